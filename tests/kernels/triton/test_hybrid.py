"""A model whose first layers keep their experts in host memory, against the same model all on the GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import gates
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.hybrid import link, moe
from halfbyte.model import synthetic
from halfbyte.model.checkpoint import place_experts
from halfbyte.model.direct import HostExperts
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.plan.phase import ARCHES
from tests.kernels.triton.test_plan import ALL_TRITON, TINY, logits
from tests.kernels.triton.triton_cases import error

CONFIG = TINY.with_(layers=2, layer_kinds=())
FLAGS = ALL_TRITON | {"layers": "checkpoint"}
CHUNKS = [4, 1]
TOKENS = torch.randint(0, 64, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0)).tolist()


class InstantLink:
    """A link to a device that is the host: everything happens at once, and a slot that is filled too early shows."""

    def __init__(self) -> None:
        self.calls = self.fetches = 0
        self.full = [False] * link.SLOTS
        self.wire_seconds = 0.0

    def page_locked(self, count: int) -> Tensor:
        return torch.full((count,), torch.nan)

    def lock(self, memory: Tensor) -> None:
        assert memory.is_contiguous()

    def copy(self, target: Tensor, source: Tensor, count: int) -> None:
        target[:count] = source[:count]

    def call(self, function: int, argument: ctypes.Structure) -> None:
        self.calls += 1
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(ctypes.addressof(argument))

    def fetch(self, slot: int, target: Tensor, source: Tensor) -> None:
        assert not self.full[slot], "the slot holds a piece that was not read yet"
        self.full[slot] = True
        self.fetches += 1
        target.copy_(source)

    def arrive(self, slot: int) -> None:
        assert self.full[slot]

    def release(self, slot: int) -> None:
        self.full[slot] = False

    def seconds(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        return self.wire_seconds or time.perf_counter() - began


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> InstantLink:
    made = InstantLink()
    monkeypatch.setattr(link, "link_of", lambda _: made)
    return made


def model(host: str, **more: str) -> GptOss:
    chosen = gates.parse(FLAGS | {"experts_in_host": host} | more, env={})
    choice = choose(CONFIG, chosen, ARCHES["sm90"])
    layers = choice.spec.host_layers
    weights = synthetic.make(
        CONFIG, 3, layer_formats=chosen.layer_formats, layouts=choice.selection.layouts,
        host=HostExperts(layers) if layers else None,
    )  # fmt: skip
    return GptOss(weights, chosen, choice=choice)


def state_of(hybrid: GptOss) -> moe.HostState:
    state = hybrid.binding(0).state[moe.STATE]
    assert isinstance(state, moe.HostState)
    return state


@pytest.mark.parametrize(
    ("host", "stream_from", "activation", "bound"),
    [
        ("1", moe.NEVER, "float", 2e-2),
        ("all", 2, "auto", 6e-2),
        pytest.param("all", moe.NEVER, "float", 2e-2, marks=pytest.mark.slow),
        pytest.param("1", 2, "auto", 6e-2, marks=pytest.mark.slow),
    ],
)
def test_logits(host: str, stream_from: int, activation: str, bound: float, instant: InstantLink) -> None:
    """By the CPU alone, over the wire alone, and by the number of rows: the plan that holds everything on the GPU."""
    hybrid = model(host, activation=activation)
    state_of(hybrid).stream_from = stream_from
    instant.calls = instant.fetches = 0
    got, want = logits(hybrid, TOKENS, CHUNKS), logits(model("auto", activation=activation), TOKENS, CHUNKS)
    assert error(got, want) < bound
    assert not torch.equal(got, want), "experts in host memory are not multiplied as those on the GPU"
    layers = CONFIG.layers if host == "all" else int(host)
    streamed = sum(rows >= stream_from for rows in CHUNKS)
    assert instant.calls == layers * (len(CHUNKS) - streamed)
    assert instant.fetches == layers * streamed * len(pieces_of(hybrid))
    assert "hybrid.moe" in hybrid.plan.record.phases()
    assert hybrid.plan.differences() == [], "every kernel is one that its phase declares"


def pieces_of(hybrid: GptOss) -> list[tuple[str, int]]:
    count = -(-CONFIG.experts // moe.PIECES)
    return [(role, first) for role in ("gate_up", "down") for first in range(0, CONFIG.experts, count)]


def test_streamed_experts_have_the_bits_of_those_on_the_gpu(instant: InstantLink) -> None:
    hybrid = model("1")
    state_of(hybrid).stream_from = 1
    assert torch.equal(logits(hybrid, TOKENS, CHUNKS), logits(model("auto"), TOKENS, CHUNKS))


def test_deterministic_streams_prompts_and_multiplies_answers(instant: InstantLink) -> None:
    hybrid = model("all", deterministic="on")
    state = state_of(hybrid)
    state.stream_from = moe.NEVER
    layer = moe.HostLayer(replace(hybrid.binding(0), spec=hybrid.spec), state, moe.TritonMoe().bind)
    used: list[str] = []
    layer._triton = lambda step, acts: used.append("wire")  # type: ignore[method-assign]
    layer._multiply = lambda rows, acts: used.append("cpu")  # type: ignore[method-assign]
    for regime in ("decode", "batch", "prefill", "long"):
        step: Any = type("S", (), {"rows": 1, "regime": regime})()
        layer.launch(step, None)  # type: ignore[arg-type]
    assert used == ["cpu", "cpu", "wire", "wire"]


@pytest.mark.parametrize(("wire", "expected"), [(1e-12, moe.TRIED_ROWS[0]), (1e9, moe.NEVER)])
def test_the_faster_way_is_measured(wire: float, expected: int, instant: InstantLink) -> None:
    instant.wire_seconds = wire
    assert state_of(model("1")).stream_from == expected


def test_a_refused_job_is_not_a_number(instant: InstantLink) -> None:
    """An expert that does not exist reaches the library: its rows are NaN, and nothing is read out of bounds."""
    hybrid = model("1")
    layer = moe.HostLayer(replace(hybrid.binding(0), spec=hybrid.spec), state_of(hybrid), moe.TritonMoe().bind)
    room = state_of(hybrid).room(2)
    room.host_in.zero_()
    job = layer._job(2, room)
    at = 2 * CONFIG.hidden
    room.host_in[at : at + 2 * CONFIG.top_k] = torch.full((2 * CONFIG.top_k,), 99, dtype=torch.int32).view(
        torch.float32
    )
    native.open_library().calls.hb_run_expert_job(ctypes.byref(job))
    assert job.failures == 1
    assert bool(room.host_out[:at].isnan().all())


def test_placed_weights_are_those_that_are_loaded_so() -> None:
    chosen = gates.parse(FLAGS, env={})
    everywhere = synthetic.make(CONFIG, 3, layer_formats=chosen.layer_formats)
    loaded = synthetic.make(CONFIG, 3, layer_formats=chosen.layer_formats, host=HostExperts(1))
    placed = place_experts(everywhere, 1)
    for a, b in zip(placed.layers, loaded.layers):
        assert isinstance(a.gate_up, type(b.gate_up))
        assert a.gate_up.layout == b.gate_up.layout  # type: ignore[union-attr]
        assert torch.equal(a.gate_up.data, b.gate_up.data)
        assert torch.equal(a.down.data, b.down.data)
    assert [layer.gate_up.layout for layer in placed.layers] == ["rows16", "plain"]  # type: ignore[union-attr]
