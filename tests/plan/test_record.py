"""The record: what ran, how often, in which regime; and a wrong kernel behind a phase is named."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import launches, record, reference
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import Counts, KernelImage, Part, launched
from halfbyte.plan.record import Declared, GraphRun, NodeKernel, PhaseRun, Record
from halfbyte.plan.step import Step
from tests.reference import REFERENCE

SMALL = NAMED["small"]
TORCH = torch.__version__


def a_model() -> GptOss:
    return GptOss(synthetic.make(SMALL, seed=0), REFERENCE)


def test_launches_are_counted_by_regime_and_are_what_was_declared() -> None:
    model = a_model()
    solo = SingleSequence(model, 128)
    solo.feed(list(range(70)))
    for token in (5, 6):
        solo.feed([token])
    r = model.plan.record
    moe = NodeKernel("torch: reference.moe", TORCH)
    assert r.launches("prefill")[moe] == SMALL.layers
    assert r.launches("decode")[moe] == 2 * SMALL.layers
    assert r.launches()[moe] == 3 * SMALL.layers
    assert r.launches("batch") == Counter()
    assert r.phases("decode") == set(model.plan.selection.chosen["decode"])
    run = next(run for run in r.runs("prefill") if run.phase == "reference.moe")
    assert (run.runs, run.fewest_rows, run.most_rows) == (SMALL.layers, 70, 70)
    assert model.plan.differences() == []
    shown = json.loads(json.dumps(r.as_dict()))
    assert set(shown["regimes"]) == {"prefill", "decode"}
    (way,) = shown["regimes"]["decode"]
    kernels = {k["name"]: k for phase in way["phases"] for k in phase["kernels"]}
    assert kernels["torch: reference.moe"] == {
        "name": "torch: reference.moe", "module": TORCH, "category": "moe", "operations": ["moe"],
        "launches": 2 * SMALL.layers,
    }  # fmt: skip


class WrongMoe(reference.Moe):
    name = "test.wrong_moe"


def plant(model: GptOss, other: reference.Moe) -> None:
    """Another body behind the phase: selection, names of phases and plan stay as they were."""
    for bound in model.plan.bound.values():
        for i, b in enumerate(bound):
            if b.phase.name == "reference.moe":
                binding = replace(model.binding(0), weights=model.weights.layers[0])
                bound[i] = replace(b, launch=other.bind(binding))


def test_a_planted_kernel_is_named() -> None:
    model = a_model()
    plant(model, WrongMoe())
    SingleSequence(model, 128).feed([5])
    (difference,) = model.plan.differences()
    assert (difference.regime, difference.phase) == ("decode", "reference.moe")
    assert "launched torch: test.wrong_moe" in str(difference)
    assert "does not declare" in str(difference)


def test_another_build_of_the_same_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    right = torch.__version__
    monkeypatch.setattr(reference.torch, "__version__", "0.0.0")
    plant(model, reference.Moe())
    monkeypatch.setattr(reference.torch, "__version__", right)
    SingleSequence(model, 128).feed([5])
    (difference,) = model.plan.differences()
    assert "launched another build of torch: reference.moe (0.0.0; declared: " + right in str(difference)


def test_a_phase_that_launches_nothing_or_never_runs_is_named() -> None:
    model = a_model()
    bound = model.plan.bound["decode"]
    norm = next(i for i, b in enumerate(bound) if b.phase.name == "reference.final_norm")

    def silent(step: Step, acts: Activations) -> None:
        acts.h = acts.x[step.logit_rows.long()]

    bound[norm] = replace(bound[norm], launch=silent)
    bound[:] = [b for b in bound if b.phase.name != "reference.attn_norm"]
    layer_norm = next(i for i, b in enumerate(bound) if b.phase.name == "reference.qkv")
    qkv = bound[layer_norm].launch

    def from_x(step: Step, acts: Activations) -> None:
        acts.h = acts.x
        qkv(step, acts)

    bound[:] = [replace(b, launch=from_x) if b.phase.name == "reference.qkv" else b for b in bound]
    SingleSequence(model, 128).feed([5])
    said = {d.phase: d.problem for d in model.plan.differences()}
    assert said == {
        "reference.final_norm": "ran without a kernel on record",
        "reference.attn_norm": "was chosen and never ran",
    }


# ---- graphs ---------------------------------------------------------------------------------------------------------

OURS, TORCHS = NodeKernel("grouped", "aaaa"), NodeKernel("vectorized_copy", "")


def captured(nodes: list[NodeKernel] | None, launches_of: dict[KernelImage, int]) -> Record:
    r = Record()
    with r.capturing("batch", 8) as graph:
        run = PhaseRun("cuda.grouped_moe", "moe", ("moe",), "batch", {}, "bf16", "bf16")
        r.into.phases["cuda.grouped_moe", "batch"] = run
        part = Part("moe", ("moe",))
        for image, count in launches_of.items():
            run.kernels[image, part] = count
    graph.nodes = None if nodes is None else Counter(nodes)
    return r


def differences(r: Record) -> list[str]:
    declared = {("cuda.grouped_moe", "batch"): [Declared("grouped", frozenset({"aaaa", "bbbb"}))]}
    return [str(d) for d in r.differences({"batch": ("cuda.grouped_moe",)}, declared)]  # type: ignore[dict-item,arg-type]


def test_replays_multiply_what_a_graph_holds() -> None:
    r = captured([OURS, OURS, TORCHS], {KernelImage("grouped", "aaaa"): 2})
    assert r.phases() == set(), "captured is not run"
    assert r.launches() == Counter()
    (graph,) = r.graphs
    graph.replays += 3
    assert r.phases("batch") == {"cuda.grouped_moe"}
    assert r.launches()[OURS] == 6
    assert differences(r) == []
    (way,) = json.loads(json.dumps(r.as_dict()))["regimes"]["batch"]
    assert (way["way"], way["replays"], way["source"], way["nodes"]) == ("graph of 8 rows", 3, "graph nodes", 3)
    assert way["other"] == [{"name": "vectorized_copy", "launches": 3}]
    assert way["phases"][0]["kernels"][0]["launches"] == 6


def test_a_graph_that_holds_something_else_is_named() -> None:
    r = captured([NodeKernel("grouped", "bbbb")], {KernelImage("grouped", "aaaa"): 1})
    r.graphs[0].replays = 1
    said = differences(r)
    assert (
        "outside of the phases (batch): in the graph of 8 rows grouped (bbbb) stands 1 times, launched 0 times" in said
    )
    assert (
        "outside of the phases (batch): in the graph of 8 rows grouped (aaaa) stands 0 times, launched 1 times" in said
    )


def test_a_graph_that_cannot_be_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "GRAPH_READER", "halfbyte.no_such_module")
    r = captured(None, {KernelImage("grouped", "aaaa"): 1})
    (graph,) = r.graphs
    graph.read(1)
    graph.replays = 1
    (way,) = r.as_dict()["regimes"]["batch"]
    assert "launches counted at capture (ModuleNotFoundError" in way["source"]
    assert differences(r) == []


def test_nothing_is_kept_without_a_sink() -> None:
    now = launches.state()
    now.sink = counts = Counts()
    try:
        launched(KernelImage("kept", "0"))
        with launches.uncounted():
            launched(KernelImage("stray", "0"))
        assert now.sink is counts
    finally:
        now.sink = None
    launched(KernelImage("stray", "0"))
    assert [image.name for image, _ in counts] == ["kept"]
    assert GraphRun().loaded() == Counter()
