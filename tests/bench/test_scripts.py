"""Every script that times a kernel explains itself anywhere; without a GPU it says so and ends with status 2."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPTS = sorted(
    f"bench.{path.parent.name}.{path.stem}"
    for folder in ("kernels", "experiments")
    for path in (BENCH / folder).glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8")
)
WITHOUT_GPU = ("bench.experiments.simulated_streams",)


def test_scripts_are_found() -> None:
    assert "bench.kernels.decode" in SCRIPTS
    assert "bench.experiments.rehearsal" in SCRIPTS
    assert len(SCRIPTS) == 16


def test_no_script_changes_where_python_looks() -> None:
    for path in BENCH.glob("*/*.py"):
        text = path.read_text(encoding="utf-8")
        assert "sys.path" not in text, path
        assert "noqa: E402" not in text, path


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert f"python -m {name}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the scripts would measure it")
@pytest.mark.parametrize(
    "name", [s for s in SCRIPTS if not s.startswith("bench.kernels.cpu_") and s not in WITHOUT_GPU]
)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.err.count("\n") == 1, printed.err
    assert "GPU" in printed.err
    assert not printed.out


def test_a_receipt_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bench.kernels import runner
    from halfbyte.lab.result import Cell, Result

    out = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["tool", "--out", str(out), "--repeats", "3"])
    receipt = runner.Receipt("tool", out, {"a.cu": "hash"})
    receipt.add(Result(Cell("kernel"), refused="not tried"))
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["command"] == ["--out", "x.json", "--repeats", "3"]
    assert (written["measured"], len(written["results"])) == ({"a.cu": "hash"}, 1)
