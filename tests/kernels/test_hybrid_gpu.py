"""Experts in host memory on a real GPU: the link, logits by either way, graphs, the engine, and what it leaves behind.

`tests/kernels/triton/test_hybrid.py` shows the arithmetic without a GPU. Here are the things that only a driver can get
wrong: copies that run ahead, host functions in graphs, locked pages, threads that should sleep.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import gates
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import Request, SamplingParams, SourceInfo
from halfbyte.errors import EngineDiedError
from halfbyte.formats import convert
from halfbyte.kernels.hybrid import link, moe
from halfbyte.model import checkpoint, host_copy, load, self_test, synthetic
from halfbyte.model.direct import HostExperts
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.single_sequence import SingleSequence
from tests.kernels.test_on_gpu import ROOM, SMALL, TRITON, Distance, expected_of, logits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BUILD = "test_hybrid_gpu:build"
LARGE = link.OWN_PAGES  # bytes that are locked
WAYS = {"cpu": moe.NEVER, "wire": 1, "by rows": 65}
INT8 = 6e-2  # relative difference that int8 activations make in the logits of these small random models
WORDS = [[5, 6, 7], [9, 8], list(range(20, 90)), [300] * 9, [40, 41], [1000, 7, 1000], list(range(400, 415)), [77]]


# ---- the link -------------------------------------------------------------------------------------------------------


def test_memory_is_locked_as_long_as_somebody_wants_it() -> None:
    memory, small = torch.ones(LARGE, dtype=torch.uint8), torch.ones(4096, dtype=torch.uint8)
    one, other = link.CudaLink(torch.device("cuda")), link.CudaLink(torch.device("cuda"))
    for who in (one, other, other):  # two regimes may bind the same layer
        who.lock(memory)
        who.lock(small)
    assert memory.is_pinned()
    assert not small.is_pinned(), "its page belongs to others too"
    del one
    gc.collect()
    assert memory.is_pinned()
    del other, who
    gc.collect()
    assert not memory.is_pinned()
    again = link.CudaLink(torch.device("cuda"))
    again.lock(memory)
    assert memory.is_pinned()


def test_fetches_run_ahead_and_never_overtake() -> None:
    """The stream is kept busy, so that the side stream comes to each slot long before it is released."""
    device = torch.device("cuda")
    chain = link.CudaLink(device)
    source = torch.arange(40, dtype=torch.uint8).repeat_interleave(LARGE // 40 + 1)[:LARGE].contiguous()
    chain.lock(source)
    size, seen = LARGE // 40, []
    slots = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(link.SLOTS)]
    pieces = [source[i * size : (i + 1) * size] for i in range(40)]
    for slot in range(link.SLOTS):
        chain.release(slot)
    for i in range(link.SLOTS):
        chain.fetch(i, slots[i], pieces[i])
    for i in range(40):
        slot = i % link.SLOTS
        chain.arrive(slot)
        torch.cuda._sleep(300_000)
        seen.append(slots[slot].clone())
        chain.release(slot)
        if i + link.SLOTS < 40:
            chain.fetch(slot, slots[slot], pieces[i + link.SLOTS])
    torch.cuda.synchronize()
    assert all(torch.equal(got.cpu(), piece) for got, piece in zip(seen, pieces))


def test_streamed_layers_have_the_bits_of_those_in_host_memory() -> None:
    """Layer behind layer through the same buffers, while the stream is behind the host."""
    shape = (43, 512, 2880)  # a stack of 43 is cut in pieces that are not all of one size
    layers = [
        convert(synthetic._mxfp4(synthetic._Draw(f"{i}", torch.device("cpu")), shape, 0.1, balanced=False), "rows16")
        for i in range(4)
    ]
    stream = moe.ExpertStream(link.CudaLink(torch.device("cuda")), torch.device("cuda"), layers[0], layers[1])
    got = []
    for a, b in ((0, 1), (2, 3), (1, 0), (3, 2), (0, 3)):
        torch.cuda._sleep(2_000_000)
        stream.fill(layers[a], layers[b])
        got += [
            (a, stream.gate_up.data.clone(), stream.gate_up.scales.clone()),
            (b, stream.down.data.clone(), stream.down.scales.clone()),
        ]
    torch.cuda.synchronize()
    for index, data, scales in got:
        want = convert(layers[index], "plain")
        assert torch.equal(data.cpu(), want.data)
        assert torch.equal(scales.cpu(), want.scales)


def test_tensors_come_into_host_memory_whole() -> None:
    """Through the buffers: more than two of them, and a last piece that fills none."""
    tensor = torch.randint(0, 256, (5, host_copy.BUFFER // 2 + 7), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(2_000_000)
    tensor += 1  # behind the host
    moved = host_copy.in_host_memory(tensor)
    assert (moved.device.type, moved.is_pinned()) == ("cpu", False)
    assert torch.equal(moved, tensor.cpu())
    assert torch.equal(host_copy.in_host_memory(tensor.t()), tensor.cpu().t())


# ---- a small model --------------------------------------------------------------------------------------------------


def small(g: gates.Gates, way: str = "") -> GptOss:
    """On the GPU as a whole or in part; `way`: how rows of the layers in host memory are multiplied."""
    choice = choose(SMALL, g, arch_of("cuda"))
    weights = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    for layer, role, tensor in list(weights.items()):
        assert not isinstance(tensor, checkpoint.DenseTiles)
        setattr(weights if layer is None else weights.layers[layer], role, tensor.to("cuda"))
    layers = choice.spec.host_layers
    placed = checkpoint.assemble(
        checkpoint.MemorySource(weights), layouts=choice.selection.layouts, host=HostExperts(layers) if layers else None
    )
    model = GptOss(placed, g, choice=choice)
    if way:
        state_of(model).stream_from = WAYS[way]
    return model


def state_of(model: GptOss) -> moe.HostState:
    state = model.binding(0).state[moe.STATE]
    assert isinstance(state, moe.HostState)
    return state


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("host", ["1", "all"])
def test_logits_beside_the_reference(host: str, way: str) -> None:
    """float32 activations on the CPU: as near to the reference as an all-GPU plan has to be."""
    g = gates.parse({"experts_in_host": host}, env={}, preset="exact")
    model = small(g, way)
    assert model.spec.host_activation == "f32"
    got = logits(model)
    expected, moved = expected_of("exact", ())
    assert "hybrid.moe" in model.plan.record.phases()
    assert [str(d) for d in model.plan.differences()] == []
    found = Distance.of(got, expected)
    assert torch.isfinite(got).all()
    assert found.whole < ROOM * max(d.whole for d in moved)
    assert found.median < ROOM * max(d.median for d in moved)
    assert all(job.failures == 0 for layer in host_layers(model) for job in layer._jobs.values())


def host_layers(model: GptOss) -> list[moe.HostLayer]:
    """The layers in host memory, as the plan has bound them."""
    bound = {id(b.launch): b.launch for steps in model.plan.bound.values() for b in steps}
    owners = [getattr(launch, "__self__", None) for launch in bound.values()]
    return [owner for owner in owners if isinstance(owner, moe.HostLayer)]


def test_streamed_experts_have_the_bits_of_the_plan_that_holds_them() -> None:
    """The same Triton kernels, once from the GPU's memory and once from the buffers."""
    everywhere = small(gates.parse(TRITON, env={}, preset="exact"))
    streamed = small(gates.parse(TRITON | {"experts_in_host": "all"}, env={}, preset="exact"), "wire")
    assert len(host_layers(streamed)) == SMALL.layers
    assert torch.equal(logits(streamed), logits(everywhere))


def test_int8_activations_stay_within_their_bound() -> None:
    flags = {"experts_in_host": "all"}
    model = small(gates.parse(flags, env={}, preset="balanced"), "cpu")
    assert model.spec.host_activation == "int8"
    got, want = logits(model), logits(small(gates.parse({}, env={}, preset="balanced")))
    assert float(((got - want).norm(dim=1) / want.norm(dim=1)).median()) < INT8


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
def test_a_graph_calls_the_cpu_kernels_whenever_it_is_replayed(rows: int) -> None:
    """Other tokens than those of the capture; every bit as the eager step has it."""
    model = small(gates.parse({"experts_in_host": "1"}, env={}, preset="balanced"), "cpu")
    model.allocate_kv(2 * rows + 1)
    with torch.inference_mode():
        graph = DecodeGraph(model, rows, 4)
        for i, kind in enumerate(("sliding", "full")):
            graph.step.block_tables[kind][:, 0] = torch.arange(rows, device="cuda") * 2 + 1 + i
        graph.capture()
        for seed in range(3):
            tokens = torch.randint(0, SMALL.vocab, (rows,), generator=torch.Generator().manual_seed(seed))
            graph.fields["tokens"].copy_(tokens)
            replayed = graph.replay().clone()
            assert torch.isfinite(replayed).all()
            assert torch.equal(replayed, model.forward(graph.step))
    assert model.plan.record.graphs[0].nodes is not None, model.plan.record.graphs[0].unread
    assert [str(d) for d in model.plan.differences()] == []


def test_the_self_test_passes() -> None:
    g = gates.parse({"experts_in_host": "1"}, env={}, preset="balanced")
    choice = choose(SMALL, g, arch_of("cuda"))
    report = self_test.run(SMALL, choice, g, torch.device("cuda"))
    assert report.problems == ()


# ---- the embedded model through the engine --------------------------------------------------------------------------


def embedded(**flags: str) -> GptOss:
    model = load.load_model(
        load.resolve_model(None), gates.parse(flags, env={}, preset="balanced"), device="cuda", self_test="off"
    )
    if "experts_in_host" in flags:
        state_of(model).stream_from = WAYS["by rows"]
    return model


def engine(model: GptOss) -> EngineCore:
    options = EngineOptions(gates=model.gates, max_context=1024, kv_gib=0.25, reserve_gib=0.0, max_seqs=8)
    return core_for(model, load.tokenizer_of(load.resolve_model(None)), options)[0]


def answers(core: EngineCore, prompts: Sequence[Sequence[int]], count: int = 40) -> list[list[int]]:
    """Greedy tokens; all prompts are asked at once."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found: dict[str, list[int]] = {}
    for prompt in prompts:
        request = Request(list(prompt), params)
        found[request.id] = []
        core.submit(request)
    while core.has_work:
        for id, delta in core.step():
            assert delta.error is None, delta.error
            found[id] += delta.tokens
    return list(found.values())


@pytest.mark.parametrize("host", ["4", "all"])
def test_tokens_of_the_embedded_model(host: str) -> None:
    """Teacher-forced beside the plan that holds every expert: the same token wherever its margin is larger than what
    int8 activations move, for a prompt over the wire, a batch's rows and single rows."""
    tokens = [t for prompt in WORDS for t in prompt] * 3
    chunks = (100, 1, 20, 1, 1, 70)
    both = []
    for model in (embedded(experts_in_host=host), embedded()):
        solo, rows, at = SingleSequence(model, 512), [], 0
        with torch.inference_mode():
            for n in chunks:
                rows.append(solo.feed(tokens[at : at + n], all_logits=True).float().cpu())
                at += n
        both.append(torch.cat(rows))
    got, want = both
    assert float((got - want).norm() / want.norm()) < INT8
    top = want.topk(2).values
    sure = top[:, 0] - top[:, 1] > 2 * (got - want).abs().amax(1)
    assert float(sure.float().mean()) > 0.5
    assert got.argmax(1)[sure].equal(want.argmax(1)[sure])


def test_graphs_answer_as_eager_steps_do() -> None:
    with_graphs, eager = embedded(experts_in_host="all"), embedded(experts_in_host="all", graphs="off")
    assert answers(engine(with_graphs), WORDS[:1]) == answers(engine(eager), WORDS[:1])
    assert with_graphs.plan.record.graphs
    assert not eager.plan.record.graphs


def test_a_batch_answers_as_each_request_alone() -> None:
    core = engine(embedded(experts_in_host="4", deterministic="on"))
    alone = [answers(core, [prompt])[0] for prompt in WORDS]
    assert answers(core, WORDS) == alone


def test_cancelled_requests_leave_nothing_behind() -> None:
    model = embedded(experts_in_host="all")
    core = engine(model)
    (before,) = answers(core, WORDS[:1])
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for rounds in range(6):
        requests = [Request(list(prompt), params) for prompt in WORDS]
        for request in requests:
            core.submit(request)
        for _ in range(rounds):  # in the middle of a prompt, of a graph, of a batch that shrinks
            core.step()
        for request in requests:
            core.cancel(request.id)
        while core.has_work:
            core.step()
    assert answers(core, WORDS[:1]) == [before]
    assert all(job.failures == 0 for layer in host_layers(model) for job in layer._jobs.values())


def test_an_idle_engine_takes_no_cpu() -> None:
    core = engine(embedded(experts_in_host="all"))
    answers(core, WORDS)
    torch.cuda.synchronize()
    time.sleep(0.2)
    began = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - began < 0.05


# ---- a process that is killed ---------------------------------------------------------------------------------------


def build(settings: dict[str, Any], report: Callable[[str], None]) -> tuple[EngineCore, SourceInfo]:
    model = embedded(experts_in_host="all")
    options = EngineOptions(gates=model.gates, max_context=1024, kv_gib=0.25, reserve_gib=0.0, max_seqs=8)
    core, info, _ = core_for(model, load.tokenizer_of(load.resolve_model(None)), options)
    return core, info


async def test_a_process_that_is_killed_in_a_step_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = EngineProcess(BUILD, {}, restarts=2, first_pause=0.05)
    await source.open()

    async def ask(count: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [t async for delta in source.stream(Request([5, 6, 7], params)) for t in delta.tokens]

    try:
        want, first = await ask(24), source.pid
        assert first is not None
        running = asyncio.create_task(ask(900))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await running
        while not source.ready:
            assert not source.health().gone
            await asyncio.sleep(0.1)
        assert source.pid != first
        assert await ask(24) == want
    finally:
        await source.close()
