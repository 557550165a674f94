"""The comparison inside vLLM and what packs it explain themselves, and a figure without its kernel is no figure."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.vllm import compare
from halfbyte.gates import parse
from halfbyte.plan.phase import ARCHES
from halfbyte.vllm_plugin.selection import Shapes, choose


@pytest.mark.parametrize("name", ["bench.vllm.compare", "bench.vllm.pack"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(["--help"])
    assert ended.value.code == 0
    assert f"python -m {name}" in capsys.readouterr().out


def test_every_variant_has_a_kernel_on_an_h200(tmp_path: Path) -> None:
    compare.config("120b", tmp_path)
    shapes = Shapes.of(SimpleNamespace(**json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))))
    for gates, _ in compare.VARIANTS.values():
        if gates is not None:
            choose(shapes, parse(gates, env={}), ARCHES["sm90"])


def answer(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(returncode=code, stdout=said, stderr="")

    monkeypatch.setattr(subprocess, "run", run)


def test_another_kernel_than_the_chosen_one_has_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = {"figures": {"pp2048": 3.0}, "start_seconds": 1.0, "report": {"differences": []}}
    answer(monkeypatch, 0, "noise\n" + json.dumps(good))
    assert compare.measure("plugin-mxfp4", tmp_path, True, 1.0)["figures"] == {"pp2048": 3.0}
    for report, reason in ((None, "not active"), ({"differences": ["x: never ran"]}, "never ran")):
        answer(monkeypatch, 0, json.dumps(good | {"report": report}))
        found = compare.measure("plugin-mxfp4", tmp_path, True, 1.0)
        assert "figures" not in found
        assert reason in found["reason"]
    answer(monkeypatch, 1, "out of memory")
    assert compare.measure("shipped", tmp_path, True, 1.0) == {"reason": "out of memory"}


def test_ratios_are_to_the_best_shipped() -> None:
    results = {
        "shipped": {"figures": {"a": 2.0, "b": 8.0}}, "shipped-marlin": {"figures": {"a": 4.0}},
        "shipped-triton": {"reason": "no"}, "plugin-mxfp4": {"figures": {"a": 6.0, "b": 4.0}},
        "plugin-checkpoint": {"reason": "no"},
    }  # fmt: skip
    assert compare.ratios(results) == {"plugin-mxfp4": {"a": 1.5, "b": 0.5}}


def test_a_variant_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["120b", "out.json", "--only", "nothing"])
    assert "there is no variant nothing" in capsys.readouterr().err
    assert sys.modules.get("vllm") is None
