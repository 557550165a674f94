"""The comparison inside vLLM and what packs it explain themselves, and a figure without its kernel is no figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.measurement import MEASUREMENTS, Run
from bench.vllm import compare, host
from bench.vllm.receipt import results_of, sources
from halfbyte.errors import UsageError
from halfbyte.lab.result import from_json
from halfbyte.plan.phase import ARCHES
from halfbyte.vllm_plugin.inside import read_options
from halfbyte.vllm_plugin.layers import choose
from halfbyte.vllm_plugin.selection import Shapes


def test_every_variant_has_a_kernel_on_an_h200(tmp_path: Path) -> None:
    compare.config("120b", tmp_path)
    shapes = Shapes.of(SimpleNamespace(**json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))))
    units = {}
    for name, (options, _) in compare.VARIANTS.items():
        if options is not None:
            read = read_options({"halfbyte": options})
            units[name] = choose(shapes, read.gates, ARCHES["sm90"], unit=read.unit).unit
    assert units == {
        "plugin-baseline": "operations", "plugin-checkpoint": "layers", "plugin-mxfp4": "layers",
        "plugin-checkpoint-operations": "operations", "plugin-mxfp4-operations": "operations",
    }  # fmt: skip


ASKED = compare.Options(figures=("pp2048",), seconds=1.0)


def answer(monkeypatch: pytest.MonkeyPatch, code: int, result: Any, said: str = "") -> None:
    def run(command: list[str], **_: Any) -> Any:
        if result is not None:
            Path(json.loads(command[-1])[1]).write_text(json.dumps(result), encoding="utf-8")
        return SimpleNamespace(returncode=code, stdout=said, stderr="")

    monkeypatch.setattr(subprocess, "run", run)


def test_another_kernel_than_the_chosen_one_has_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = {"figures": {"pp2048": 3.0}, "start_seconds": 1.0, "report": {"differences": []}}
    answer(monkeypatch, 1, None, "out of memory")
    assert compare.measure("shipped", tmp_path, ASKED) == {"reason": "out of memory"}
    answer(monkeypatch, 0, good)
    assert compare.measure("plugin-mxfp4", tmp_path, ASKED)["figures"] == {"pp2048": 3.0}
    for report, reason in ((None, "not active"), ({"differences": ["x: never ran"]}, "never ran")):
        answer(monkeypatch, 0, good | {"report": report})
        found = compare.measure("plugin-mxfp4", tmp_path, ASKED)
        assert "figures" not in found
        assert reason in found["reason"]


def test_what_a_variant_had_when_its_time_was_over_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **_: Any) -> Any:
        Path(json.loads(command[-1])[1]).write_text(json.dumps({"figures": {"pp2048": 3.0}}), encoding="utf-8")
        raise subprocess.TimeoutExpired(command, 1.0, b"loading")

    monkeypatch.setattr(subprocess, "run", run)
    found = compare.measure("shipped", tmp_path, ASKED)
    assert found["figures"] == {"pp2048": 3.0}
    assert "it said: loading" in found["reason"]


def test_rounds_are_joined_by_their_median() -> None:
    first = compare.joined(None, {"figures": {"a": 3.0}, "report": None})
    second = compare.joined(first, {"figures": {"a": 5.0, "b": 1.0}})
    assert second["figures"] == {"a": 4.0, "b": 1.0}
    assert second["rounds"] == [{"a": 3.0}, {"a": 5.0, "b": 1.0}]
    assert compare.joined(second, {"reason": "no"})["figures"] == {"a": 4.0, "b": 1.0}
    assert compare.joined({"reason": "no"}, {"figures": {"a": 2.0}})["figures"] == {"a": 2.0}


def test_where_two_variants_part() -> None:
    best = [[[7, -0.1], [9, -0.2]], [[8, -1.0], [3, -1.01]]]
    probes = {"shipped": {"tokens": [[7, 8]], "best": [best]}, "plugin-mxfp4": {"tokens": [[7, 3]], "best": [best]}}
    results = {name: {"probe": probe} for name, probe in probes.items()} | {"plugin-checkpoint": {"reason": "no"}}
    assert compare.agreement(results) == {"plugin-mxfp4": [{"equal": 1, "of": 2, "best": -1.0, "ours": -1.01}]}


def test_ratios_are_to_the_best_shipped() -> None:
    results = {
        "shipped": {"figures": {"a": 2.0, "b": 8.0}}, "shipped-marlin": {"figures": {"a": 4.0}},
        "shipped-triton": {"reason": "no"}, "plugin-mxfp4": {"figures": {"a": 6.0, "b": 4.0}},
        "plugin-checkpoint": {"reason": "no"}, "plugin-baseline": {"figures": {"a": 2.0, "b": 16.0}},
    }  # fmt: skip
    assert compare.ratios(results) == {
        "plugin-mxfp4": {"a": 1.5, "b": 0.25},
        "plugin-baseline": {"a": 1.0, "b": 2.0},  # against the same kernel without the plugin
    }


def test_the_receipt_is_of_the_one_schema(tmp_path: Path) -> None:
    report = {"unit": "layers", "why": "", "plan": {}, "record": {"regimes": {}}, "differences": []}
    results = {
        "shipped": {"figures": {"tg128 @ 2048": 200.0, "pp2048": 10.0}, "start_seconds": 1.0, "host": {"loop_ns": 9.0}},
        "plugin-mxfp4": {"figures": {"tg128 @ 2048": 500.0, "pp2048": 9.0, "tg128 c8": 7.0}, "report": report},
        "plugin-checkpoint": {"reason": "out of memory"},
    }
    found = results_of("120b", "0.26.0", compare.VARIANTS, results, {"plugin-mxfp4": [{"equal": 24, "of": 24}]})
    run = Run(MEASUREMENTS["inside-vllm"], tmp_path / "receipt.json")
    run.sources |= sources()
    run.add(*found)
    read = from_json(json.loads((tmp_path / "receipt.json").read_text(encoding="utf-8")))
    cells = {(r.cell.path, r.cell.label): r for r in read.results}
    single = cells["plugin-mxfp4", "tg128 @ d2048"]
    assert (single.figure("ratio").value, single.targets[0].ok, single.targets[0].bound) == (2.5, True, 1.5)
    assert single.detail["greedy_tokens"] == [{"equal": 24, "of": 24}]
    assert not cells["plugin-mxfp4", "pp2048"].targets[0].ok
    assert cells["shipped", "tg128 @ d2048"].detail["host"] == {"loop_ns": 9.0}
    assert cells["plugin-checkpoint", "decode"].state == "refused"
    assert any("compat_model.py" in path for path in read.measured)


def test_what_the_host_does_is_timed_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def step(self, n: int) -> int:
            return n + 1

    module: Any = ModuleType("an_engine")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "an_engine", module)
    before = Engine.__dict__["step"]
    with host.CallTimes().over(
        (("an_engine", "Engine", "step"), ("an_engine", "Engine", "gone"), ("no", "X", "y"))
    ) as seen:
        assert [Engine().step(n) for n in range(3)] == [1, 2, 3]
    assert Engine.__dict__["step"] is before
    assert len(seen.calls["Engine.step"]) == 3
    assert set(seen.medians()) == {"Engine.step"}
    facts = host.facts()
    assert facts["loop_ns"] > 0
    assert facts["processor"]


def test_a_variant_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="nothing"):
        MEASUREMENTS["inside-vllm"].parse(["only=nothing"])
    assert sys.modules.get("vllm") is None
