"""The runner of GPUs: packed inputs, graphs against eager, results that wait for their own step only.

Without a GPU a graph is stood in for by what it captures: `replay` runs it. Everything around it is the real thing.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from engine_heads import write_head

from bench.padded_model import load_padded
from halfbyte import gates
from halfbyte.engine import graphs as graphs_
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.device_runner import DeviceRunner
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.graphs import DecodeGraph, Graphs, graph_sizes
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.runner import StepHandle
from halfbyte.engine.sampling.device import TorchSampler
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.eagle3 import Eagle3Proposer, HiddenTap
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.engine.step_buffer import ALIGN, StepBuffer
from halfbyte.engine.warm_up import warm_up
from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.step import RegimeLimits, Step
from tests.reference import REFERENCE

CPU = torch.device("cpu")


def test_what_is_sent_arrives_aligned_and_typed() -> None:
    buffer = StepBuffer(CPU, 16)
    arrays = [
        np.arange(3, dtype=np.int32),
        np.array([[1.5, -2.0]], np.float32),
        np.array([1 << 40, -7], np.int64),
        np.zeros((0,), np.int32),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    ]
    sent = buffer.send(arrays)
    base = sent[0].data_ptr()
    for array, view in zip(arrays, sent):
        assert view.shape == array.shape
        assert np.array_equal(view.numpy(), array)
        assert (view.data_ptr() - base) % (4 * ALIGN) == 0 or not array.size


@pytest.mark.parametrize("limits", [*(a.limits for a in ARCHES.values()), RegimeLimits(6, 48, 1024, "of a test")])
def test_padding_carries_no_step_into_another_regime(limits: RegimeLimits) -> None:
    """There it would meet other kernels, and round as the eager step does not."""
    sizes = graph_sizes(limits)
    assert sizes[-1] == limits.batch
    for rows in range(1, sizes[-1] + 1):
        assert limits.regime(next(s for s in sizes if s >= rows)) == limits.regime(rows)


class Stand(DecodeGraph):
    """A graph without a GPU."""

    replays = 0

    def capture(self, pool: object = None) -> None:
        assert self.fields["kv_lens"].tolist() == [1] * self.step.rows, "warmed up on the scratch page"

    def replay(self) -> torch.Tensor:
        Stand.replays += 1
        self.logits = self.run()
        return self.logits


def core_of(model: GptOss, graphs: bool, **options: object) -> EngineCore:
    small = EngineOptions(max_context=512, max_rows_per_step=64, page_size=16, kv_gib=0.05, reserve_gib=0.0, **options)  # type: ignore[arg-type]
    core, _, _ = core_for(model, Tokenizer.gpt_oss(), small)
    core.runner.close()
    observer = core.proposer if isinstance(core.proposer, Eagle3Proposer) else None
    captured = Graphs(model, 32, TorchSampler(), None if observer is None else observer.tap) if graphs else None
    core.runner = DeviceRunner(model, TorchSampler(), observer, captured, rows=256, blocks=32)
    if core.proposer is not None:  # draft from the first token on, whatever it costs
        controller = core.proposer.controller
        controller.tokens, controller.draft_cost, controller.ledger = 10**9, 0.0, None
    return core


def answers(core: EngineCore, count: int) -> dict[str, list[object]]:
    """Requests that come and go, so that batches shrink, grow and mix prompts with decoding."""
    rng = random.Random(count)
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logit_bias": {9: 4.0}}, {"temperature": 0.0, "logprobs": 3}]
    waiting = [
        Request(
            [rng.randrange(2, 1024) for _ in range(rng.randint(1, 50))],
            SamplingParams(seed=i, max_tokens=rng.randint(3, 24), ignore_eos=True, **kinds[i % len(kinds)]),  # type: ignore[arg-type]
            id=f"q{i}",
        )
        for i in range(count)
    ]
    got: dict[str, list[object]] = {r.id: [] for r in waiting}
    while waiting or core.has_work:
        for _ in range(rng.randint(0, 3)):
            if waiting:
                core.submit(waiting.pop())
        for id, delta in core.step():
            assert delta.finish != "error", delta.error
            got[id] += delta.tokens
            for entry in delta.logprobs or []:
                got[id].append((entry.token, round(entry.logprob, 4), tuple(t for t, _ in entry.top)))
        core.check()
    return got


@pytest.mark.exact
def test_graphs_give_the_tokens_and_logprobs_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_, "DecodeGraph", Stand)
    monkeypatch.setattr(graphs_, "SHORT", 48)  # both lengths of capture are used
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    Stand.replays = 0
    eager = answers(core_of(model, False), 11)
    assert Stand.replays == 0
    core = core_of(model, True)
    assert answers(core, 11) == eager
    assert Stand.replays > 20
    runner = core.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs is not None
    captured = runner.graphs.captured
    assert {size for size, _ in captured} > {1, 2, 4}
    assert {blocks for _, blocks in captured} == {3, 32}
    assert all(size in runner.graphs.sizes for size, _ in captured)
    assert answers(core_of(model, True, run_ahead=False), 11) == eager
    core = core_of(model, False)
    runner = core.runner
    assert isinstance(runner, DeviceRunner)
    runner.buffer.num_words = 4  # nothing fits: every step has a buffer of its own
    assert answers(core, 11) == eager


@pytest.mark.exact
def test_after_a_warm_up_traffic_meets_nothing_new_and_gets_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_, "DecodeGraph", Stand)
    monkeypatch.setattr(graphs_, "SHORT", 48)
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    eager = answers(core_of(model, False, max_seqs=4), 5)
    for level, widths in (("fast", {3}), ("full", {3, 32})):
        used = core_of(model, True, max_seqs=4)
        runner = used.runner
        assert isinstance(runner, DeviceRunner)
        assert runner.graphs is not None
        places: list[int] = []
        seconds = warm_up(used, level, lambda name, done, of, places=places: places.append(done))  # type: ignore[misc]
        captured = set(runner.graphs.captured)
        assert {rows for rows, _ in captured} == {s for s in runner.graphs.sizes if s <= 4}
        assert {blocks for _, blocks in captured} == widths
        assert places == list(range(len(seconds) + 1))
        core = used.anew()
        assert core.stats().generated_tokens == 0
        assert core.stats().kv_pages_cached == 0
        if level == "full":
            assert answers(core, 5) == eager
            assert set(runner.graphs.captured) == captured
    assert warm_up(core_of(model, True), "off") == {}


class Turns:
    """Drafts that begin right and end wrong, of every length: what the model says, known beforehand."""

    def __init__(self, wanted: dict[str, list[int]], controller: Controller) -> None:
        self.wanted, self.controller, self.asked = wanted, controller, 0

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        proposals = []
        for seq, most in wants:
            self.asked += 1
            done = len(seq.tokens) - seq.num_prompt_tokens
            right = self.wanted[seq.request.id][done:][: self.asked % 4]
            proposals.append(Proposal([*right, *[7] * (self.asked % 3)][:most]))
        return proposals

    def observe(self, seq: Sequence, new: int) -> None: ...
    def forget(self, seq: Sequence) -> None: ...
    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()


@pytest.mark.exact
def test_drafts_are_verified_by_graphs_with_the_tokens_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged steps: other sequences, other lengths of draft and other numbers of idle rows every time."""
    monkeypatch.setattr(graphs_, "DecodeGraph", Stand)
    model = load.load_model(load.resolve_model("random:small"), page_size=16)

    def asked() -> list[Request]:
        rng = random.Random(3)
        return [
            Request(
                [rng.randrange(2, 1024) for _ in range(rng.randint(1, 40))],
                SamplingParams(temperature=float(i % 2), seed=i, max_tokens=rng.randint(10, 30), ignore_eos=True),
                id=f"v{i}",
            )
            for i in range(5)
        ]

    def run(core: EngineCore) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {}
        for r in asked():
            core.submit(r)
        while core.has_work:
            for id, delta in core.step():
                assert delta.finish != "error", delta.error
                got.setdefault(id, []).extend(delta.tokens)
            core.check()
        return got

    wanted = run(core_of(model, False))
    shapes: set[tuple[int, int]] = set()
    for graphs in (False, True):
        core = core_of(model, graphs, max_draft=6)
        controller = Controller(lambda rows, context: 1.0, longest=6)
        controller.tokens = 10**9
        core.proposer = Turns(wanted, controller)
        launch = core.runner.launch

        def noted(batch: Batch, launch: Callable[[Batch], StepHandle] = launch, graphs: bool = graphs) -> StepHandle:
            before = Stand.replays
            handle = launch(batch)
            if any(c.draft for c in batch.chunks):
                assert (Stand.replays > before) == (graphs and batch.rows == len(batch.samplers))
                shapes.add((batch.rows, len(batch.slots)))
            return handle

        core.runner.launch = noted  # type: ignore[method-assign]
        assert run(core) == wanted
        stats = core.stats()
        assert 10 < stats.accepted_tokens < stats.drafted_tokens
        assert len(shapes) > 4


@pytest.mark.exact
@pytest.mark.parametrize("method", ["eagle3", "draft"])
def test_models_that_draft_run_beside_graphs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that reads hidden states gets those of the replayed step: it guesses what it guesses without graphs."""
    monkeypatch.setattr(graphs_, "DecodeGraph", Stand)
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    draft = str(write_head(tmp_path / "head", model)) if method == "eagle3" else "random:small"
    outcomes = []
    for graphs in (False, True):
        core = core_of(model, graphs, gates=Gates(speculate=method), draft=draft, max_draft=3)
        Stand.replays = 0
        tokens = answers(core, 6)
        assert (Stand.replays > 10) == graphs
        assert core.stats().drafted_tokens > 20
        outcomes.append((tokens, core.stats().drafted_tokens, core.stats().accepted_tokens))
    assert outcomes[0] == outcomes[1]


class Pending(NamedTuple):
    """What a fused layer leaves instead of x."""

    x: torch.Tensor
    experts: torch.Tensor

    def complete(self) -> torch.Tensor:
        return self.x + self.experts


@pytest.mark.exact
def test_a_layer_that_is_not_summed_up_yet_is_tapped_whole() -> None:
    """Kernels may leave experts' results to the next layer; hidden states have them all the same."""
    model = load.load_model(load.resolve_model("random:small"), REFERENCE, page_size=16)
    steps: list[Step] = []
    forward = model.forward
    model.forward = lambda step: (steps.append(step), forward(step))[1]  # type: ignore[method-assign, func-returns-value]
    SingleSequence(model, 64).feed([5, 6, 7])
    tap = HiddenTap(model, (1,))
    logits, expected = tap(steps[0])
    bound = model.plan.bound[model.plan.regime(steps[0])]
    first = next(i for i, b in enumerate(bound) if b.phase.covers[-1] == "moe")
    moe, norm = bound[first].launch, bound[first + 1].launch

    def leave(step: Step, acts: Activations) -> None:
        moe(step, acts)
        acts.leave(Pending(acts.x - 1.0, torch.ones(())))
        assert not acts.has("x"), "nobody can mistake it for the whole"

    def add(step: Step, acts: Activations) -> None:
        pending = acts.take(Pending)
        assert pending is not None
        acts.x = pending.complete()
        norm(step, acts)

    bound[first : first + 2] = [replace(bound[first], launch=leave), replace(bound[first + 1], launch=add)]
    again, tapped = tap(steps[0])
    assert torch.allclose(tapped, expected, atol=1e-6)
    assert torch.allclose(again, logits, atol=1e-4)


def test_tables_are_sent_when_they_change_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_, "DecodeGraph", Stand)
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    core = core_of(model, True)
    moved = []
    tables = Stand.set_tables
    monkeypatch.setattr(Stand, "set_tables", lambda self, *new: (moved.append(1), tables(self, *new)))
    core.submit(Request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))
    while core.has_work:
        core.step()
    assert 3 <= len(moved) <= 6, "62 positions are four pages"


def test_a_row_that_is_no_number_is_an_error_of_its_own() -> None:
    model = load.load_model(load.resolve_model("random:small"), page_size=16)
    core = core_of(model, False)
    forward = model.forward
    model.forward = lambda step: forward(step).index_fill_(1, torch.tensor([3]), float("nan"))  # type: ignore[method-assign]
    core.submit(Request([5], SamplingParams(temperature=0.0, max_tokens=3)))
    (_, delta), *_ = [o for _ in range(4) for o in core.step()]
    assert delta.finish == "error"
    assert "not numbers" in (delta.error or "")


@pytest.mark.exact
def test_padding_a_model_changes_its_shape_and_nothing_else() -> None:
    from halfbyte.model.single_sequence import SingleSequence

    name = load.resolve_model(None)
    exact = gates.PRESETS["exact"].gates
    plain, padded = load.load_model(name, exact), load_padded(exact, "cpu")
    assert (padded.config.heads, padded.config.experts) == (16, 32)
    ids = load.tokenizer_of(name).encode("Tom has 12 apples. Then 7 more come. How many are there?")
    assert torch.equal(
        SingleSequence(padded, 128).feed(ids, all_logits=True), SingleSequence(plain, 128).feed(ids, all_logits=True)
    )
    for preset in ("exact", "balanced", "fast"):
        selection = choose(padded.config, gates.PRESETS[preset].gates, ARCHES["sm90"]).selection
        assert selection.chosen["decode"] == ("cuda.decode_step",)
        assert "cuda.prefill_layer" in selection.chosen["prefill"]


# ---- on a GPU -------------------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def embedded_core(preset: str, device: str, graphs: str) -> tuple[EngineCore, GptOss]:
    g = gates.parse({"graphs": graphs}, env={}, preset=preset)
    model = load_padded(g, device)
    options = EngineOptions(gates=g, max_context=1024, kv_gib=0.25, reserve_gib=0.0)
    core, _, _ = core_for(model, load.tokenizer_of(load.resolve_model(None)), options)
    return core, model


def told(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    out: dict[str, list[int]] = {}
    for p in prompts:
        request = Request(p, SamplingParams(temperature=0.0, max_tokens=96))
        out[request.id] = []
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            assert delta.finish != "error", delta.error
            out[id] += delta.tokens
    return list(out.values())


@pytest.mark.parametrize("preset", [pytest.param(p, marks=on_gpu) for p in ("exact", "balanced", "fast")])
def test_meaning_goes_through_the_cuda_kernels(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model, in a shape that the decode kernel takes: right answers, equal with graphs and without, and
    `launch` waits for nothing."""
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    suite = Suite("tiny", 0, 1)
    prompts = [item.prompt for item in suite.items(tokenizer) if len(item.prompt) < 600]
    core, model = embedded_core(preset, "cuda", "on")
    alone = told(core, prompts[:1])  # one row: the decode step
    launch = core.runner.launch

    def strict(batch: Batch) -> StepHandle:
        with warnings.catch_warnings():  # torch warns that this mode does not see everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert told(core, prompts[:1]) == alone  # captured
    monkeypatch.setattr(core.runner, "launch", strict)
    assert told(core, prompts[:1]) == alone
    monkeypatch.setattr(core.runner, "launch", launch)
    with_graphs = told(core, prompts)
    core.close()
    if torch.cuda.get_device_capability() == (9, 0):
        assert "cuda.decode_step" in model.plan.record.phases("decode")
    core, _ = embedded_core(preset, "cuda", "off")
    assert told(core, prompts) == with_graphs
    core.close()
    core, _ = embedded_core(preset, "cpu", "off")
    expected = told(core, prompts)
    core.close()
    same = sum(a == b for a, b in zip(with_graphs, expected))
    assert same >= 0.9 * len(prompts), f"{same} of {len(prompts)} answers are the CPU's"


@pytest.mark.parametrize("method", [pytest.param(m, marks=on_gpu) for m in ("suffix", "eagle3", "draft")])
def test_drafts_on_a_gpu(method: str) -> None:
    """Verified by graphs and eagerly: equal tokens, equal guesses; and the guesses are good ones."""
    name = load.resolve_model(None)
    tokenizer = load.tokenizer_of(name)
    prompts = [item.prompt for item in Suite("tiny", 0, 1).items(tokenizer) if len(item.prompt) < 600]
    outcomes = []
    for graphs in ("on", "off"):
        g = gates.parse({"graphs": graphs, "speculate": method}, env={}, preset="exact")
        model = load.load_model(name, g, device="cuda")
        options = EngineOptions(gates=g, max_context=1024, kv_gib=0.25, reserve_gib=0.0, max_draft=3)
        core, _, _ = core_for(model, tokenizer, options)
        assert core.proposer is not None
        core.proposer.controller.tokens, core.proposer.controller.ledger = 10**9, None
        tokens, stats = told(core, prompts), core.stats()
        outcomes.append((tokens, stats.drafted_tokens, stats.accepted_tokens))
        core.close()
    assert outcomes[0] == outcomes[1]
    _, drafted, accepted = outcomes[0]
    print(f"{method}: {accepted} of {drafted} drafted tokens accepted")
    assert accepted > 0.3 * drafted > 30
