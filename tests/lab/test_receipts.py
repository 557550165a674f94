"""A receipt is current until a file behind its figures changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.lab import environment, receipts
from halfbyte.lab.receipts import PACKAGE
from halfbyte.model.load import EMBEDDED


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_sources_of_the_decode_step() -> None:
    """The kernel, what it includes, and the Python around it; not the other kernels."""
    found = receipts.measured(["cuda.decode_step"])
    names = ("phase.py", "step.py", "step.cu", "gemv.cuh")
    assert {f"kernels/cuda/decode/{name}" for name in names} | {"kernels/launch.py"} <= set(found)
    assert not any("triton" in name or "grouped" in name for name in found)


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


def test_a_changed_file_makes_it_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels" / "x.cu"
    source.parent.mkdir()
    source.write_text("one", encoding="utf-8")
    monkeypatch.setattr(receipts, "PACKAGE", tmp_path)
    raw = {"measured": receipts.hashes([source]), "gpu": "NVIDIA H200"}
    assert receipts.freshness(raw) == ("current", "")
    source.write_text("two", encoding="utf-8")
    state, why = receipts.freshness(raw)
    assert state == "STALE"
    assert "kernels/x.cu" in why
    source.unlink()
    assert receipts.freshness(raw)[0] == "STALE"


def test_one_hash_of_a_room_or_a_program() -> None:
    from halfbyte.kernels.launch import Program

    step = Program(PACKAGE / "kernels" / "cuda" / "decode" / "step.cu", "decode_step").hash()
    assert receipts.freshness({"sources": step})[0] == "current"
    assert receipts.freshness({"environment": {"sources": environment.source_hash()}})[0] == "current"
    assert receipts.freshness({"sources": "0123456789abcdef"})[0] == "STALE"
    assert receipts.freshness({"bench": "server"})[0] == "unhashed"


def test_weights_are_hashed_where_others_find_them(tmp_path: Path) -> None:
    found = receipts.weights(EMBEDDED, tmp_path)
    assert {Path(name).name for name in found} == {p.name for p in EMBEDDED.glob("*.safetensors")}
    assert receipts.freshness({"measured": found}) == ("current", "")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert receipts.weights(tmp_path) == {}


def test_reading(tmp_path: Path) -> None:
    write(tmp_path, "a", "")
    write(tmp_path, "b", "[1]")
    row = {"model": "120b", "formats": "q8", "rows": 1, "context": 512, "tokens_per_s": 5.0, "ceiling": 10.0}
    write(tmp_path, "c", {"sources": "gone", "gpu": "NVIDIA H200", "date": "2026-01-01", "rows": [row]})
    speed = [{"model": "20b", "preset": "fast", "rows": [{"test": "pp512", "tokens_per_s": 7.0, "share": 0.5}, {}]}]
    write(tmp_path, "d", {"environment": {"gpus": [{"name": "NVIDIA B200"}], "time": "2026-02-03T"}, "speed": speed})
    scores = {"mxfp4": {"tasks": {"needle": {"problems": 300, "accuracy": 0.99}}}}
    more = {"drafted": 3, "eagle3": {"tokens_per_verification": 3.1}, "formats": [{"format": "o in q8", "kl": 1e-7}]}
    write(tmp_path, "e", {"runs": scores} | more)
    a, b, c, d, e = receipts.read_all(tmp_path)
    assert (a.state, a.why) == ("unreadable", "the file is empty")
    assert b.state == "unreadable"
    assert (c.state, c.gpu, c.date) == ("STALE", "NVIDIA H200", "2026-01-01")
    assert (c.rows[0].what, c.rows[0].figure, c.rows[0].ceiling) == ("120b q8 rows 1 @ 512", 5.0, 10.0)
    assert (d.gpu, d.date, d.rows[0].what) == ("NVIDIA B200", "2026-02-03", "20b fast pp512")
    assert [(r.what, r.figure, r.unit, r.ceiling) for r in e.rows] == [
        ("mxfp4 needle", 99.0, "% of 300", 100.0),
        ("o in q8: KL", 1e-7, "nats", None),
        ("eagle3", 3.1, "tokens", 4.0),
    ]
    with pytest.raises(UsageError, match="no receipts"):
        receipts.read_all(tmp_path / "nowhere")


def test_the_command_lists_every_receipt() -> None:
    done = CliRunner().invoke(app, ["bench", "--receipts", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["receipts"]
    assert {r["name"] for r in found} == {p.stem for p in receipts.RESULTS.glob("*.json")}
    assert all(r["state"] in ("current", "STALE", "unhashed", "unreadable") for r in found)
    shown = CliRunner().invoke(app, ["bench", "--receipts"])
    assert "STALE" in shown.stdout
