"""The scripts behind every GPU figure, started where there is no GPU: one sentence, exit status 2, no traceback."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
MEASURING = sorted(p.stem for p in BENCH.glob("*.py") if "need_gpu()" in p.read_text(encoding="utf-8"))
ARGUMENTS = {"engine_gpu": ["--speed", "random:120b"]}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the scripts would measure it")


def test_every_script_for_a_gpu_is_here() -> None:
    assert {p.stem for p in BENCH.glob("*_gpu.py")} | {"gpu", "load", "profile", "decode_stress"} <= set(MEASURING)


@pytest.mark.parametrize("name", MEASURING)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    monkeypatch.delitem(sys.modules, name, raising=False)  # another module may have this name (profile)
    script = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, script)
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.count("\n") == 1, said.err
    assert "GPU" in said.err
    assert not said.out
