"""A receipt is current until a file behind its figures changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.load import EMBEDDED


def test_sources_of_the_decode_step() -> None:
    """The kernel, what it includes, and the Python around it; not the other kernels."""
    hashes = receipts.measured(["cuda.decode_step"])
    names = ("phase.py", "step.py", "step.cu", "gemv.cuh")
    assert {f"kernels/cuda/decode/{name}" for name in names} | {"kernels/launch.py"} <= set(hashes)
    assert not any("triton" in name or "grouped" in name for name in hashes)


def test_sources_of_triton_and_grouped_phases() -> None:
    triton = receipts.measured(["triton.moe"])
    assert {"kernels/triton/moe.py", "kernels/triton/jit/gemm.py"} <= set(triton)
    grouped = receipts.measured(["cuda.grouped_moe"])
    assert {
        "kernels/cuda/prefill/grouped.cu",
        "kernels/cuda/prefill/rows.cu",
        "kernels/cuda/prefill/grouped.cuh",
    } <= set(grouped)
    assert "kernels/cuda/decode/step.cu" not in grouped


def test_sources_of_the_cpu_step() -> None:
    """Every C++ file beside it, because the library is built from all of them."""
    hashes = receipts.measured(["cpu.step"])
    names = ("phase.py", "library.py", "instruction_sets.py", "step.cpp", "products.cpp", "halfbyte_cpu.h")
    assert {f"kernels/cpu/{name}" for name in names} <= set(hashes)
    assert not any("cuda" in name for name in hashes)


def test_a_changed_file_makes_it_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels" / "x.cu"
    source.parent.mkdir()
    source.write_text("one", encoding="utf-8")
    monkeypatch.setattr(receipts, "PACKAGE", tmp_path)
    measured = receipts.hashes([source])
    assert receipts.freshness(measured) == ("current", "")
    source.write_text("two", encoding="utf-8")
    state, why = receipts.freshness(measured)
    assert state == "STALE"
    assert "kernels/x.cu" in why
    source.unlink()
    assert receipts.freshness(measured)[0] == "STALE"
    assert receipts.freshness({})[0] == "unhashed"


def test_weights_are_hashed_where_others_find_them(tmp_path: Path) -> None:
    hashes = receipts.weights(EMBEDDED, tmp_path)
    assert {Path(name).name for name in hashes} == {p.name for p in EMBEDDED.glob("*.safetensors")}
    assert receipts.freshness(hashes) == ("current", "")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert receipts.weights(tmp_path) == {}


def test_reading(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("", encoding="utf-8")
    (tmp_path / "b.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps({"bench": "gpu", "schema": 2}), encoding="utf-8")
    result = Result(Cell("decode", "120b", shape={"tg": 128}), (figure("speed", "tok/s", [5.0, 6.0, 7.0]),))
    receipts.result_file("halfbyte bench", [result], {"gone.cu": "0"}, ["--tg", "128"]).write(tmp_path / "d.json")
    a, b, c, d = receipts.read_all(tmp_path)
    assert (a.state, a.why) == ("unreadable", "the file is empty")
    assert b.state == c.state == "unreadable"
    assert "schema: expected str" in c.why
    assert (d.state, d.why) == ("STALE", "changed since: gone.cu")
    assert d.results == (result,)
    assert d.file is not None
    assert d.file.command == ("--tg", "128")
    with pytest.raises(UsageError, match="no receipts"):
        receipts.read_all(tmp_path / "nowhere")


def test_the_command_lists_every_receipt() -> None:
    done = CliRunner().invoke(app, ["receipts", "--json"])
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)["receipts"]
    assert {r["name"] for r in listed} == {p.stem for p in receipts.RESULTS.glob("*.json")}
    assert all(r["state"] in ("current", "STALE", "unhashed") for r in listed), "a receipt of another schema"
    shown = CliRunner().invoke(app, ["receipts"])
    assert shown.exit_code == 0
    assert all(r["name"] in shown.stdout for r in listed)
    assert len(shown.stdout.splitlines()) == len(listed) + 1  # a line each: one screen


def test_a_named_receipt_shows_its_figures_and_what_differs() -> None:
    shown = CliRunner().invoke(app, ["receipts", "engine-depths"])
    assert shown.exit_code == 0, shown.output
    head, columns, *rows = shown.stdout.splitlines()
    assert head.startswith("engine-depths: ")
    assert columns.split()[:2] == ["cell", "figure"]
    assert rows
    assert "120b" in head  # all cells share it
    assert not any("120b" in row for row in rows)
    missing = CliRunner().invoke(app, ["receipts", "nothing"])
    assert missing.exit_code != 0


def test_a_receipt_names_no_folder_of_the_machine() -> None:
    file = receipts.result_file("bench", (), {"a": "b"}, ["--out", "/srv/somewhere/x.json", "--pp", "512", "a/b"])
    assert file.command == ("--out", "x.json", "--pp", "512", "a/b")
    for path in (receipts.PACKAGE.parents[1] / "bench" / "results").glob("*.json"):
        assert not [w for w in json.loads(path.read_text(encoding="utf-8"))["command"] if w.startswith("/")], path
