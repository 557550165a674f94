"""The same numbers wherever they are asked: before a start, when pages are sized, and in metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfbyte.engine import build
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.sizing import (
    CPU_ROWS,
    ENGINE_PROCESS,
    GPU_CONTEXT,
    check_start,
    host_tier,
    memory_account,
    page_limits,
    rows_in_burst,
    rows_per_step,
    rows_with_decode,
    workspace,
)
from halfbyte.errors import NotEnoughMemoryError, UsageError
from halfbyte.gates import Gates
from halfbyte.memory import GIB, MemoryState
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose, page_bytes
from halfbyte.model.load import load_model, resolve_model, tokenizer_of, weight_bytes
from halfbyte.plan.phase import ARCHES

CONFIG = NAMED["120b"]
WEIGHTS = weight_bytes(resolve_model("random:120b"), Gates())
PAGE = 18 * 2 * 512 * 2 * 64
MACHINES = {
    "discrete": ("sm90", MemoryState(500 * GIB, 9 * GIB, device_total=140 * GIB, device_free=139 * GIB)),
    "unified": ("sm121", MemoryState(total=119 * GIB, available=110 * GIB, unified=True)),
    "cpu": ("cpu", MemoryState(total=256 * GIB, available=200 * GIB)),
}


def less(state: MemoryState, taken: int) -> MemoryState:
    """The same machine with that much less of what counts."""
    return replace(state, **{"available" if state.shared else "device_free": state.free - taken})


def loaded(state: MemoryState) -> MemoryState:
    """The same machine once the engine's process, its weights and its context are there."""
    process = ENGINE_PROCESS if state.shared else 0
    return less(state, WEIGHTS + process + (GPU_CONTEXT if state.on_gpu else 0))


@pytest.mark.parametrize("machine", MACHINES)
def test_serve_and_the_engine_see_the_same_room(machine: str) -> None:
    arch, before = MACHINES[machine]
    options = EngineOptions(model="random:120b")
    plan = check_start(CONFIG, options, before, ARCHES[arch], WEIGHTS)
    after = loaded(before)
    engine = memory_account(CONFIG, options, after)
    assert plan.kv_room == engine.kv_room > 0
    assert plan.reserve == engine.reserve == before.reserve
    assert rows_per_step(options, before) == rows_per_step(options, after)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_start_that_is_let_through_finds_its_pages(machine: str) -> None:
    """At the edge: what `serve` refuses by a byte the engine would refuse too, and the other way round."""
    arch, state = MACHINES[machine]
    options = EngineOptions(model="random:120b", max_context=8192)
    page = page_bytes(CONFIG, choose(CONFIG, options.gates, ARCHES[arch]).spec)
    need = page_limits(CONFIG, options, state, page).least
    account = memory_account(CONFIG, options, state, weights=WEIGHTS, own_process=True)
    edge = less(state, account.kv_room - need * page)

    def pages(now: MemoryState) -> int:
        limits = page_limits(CONFIG, options, now, page)
        return memory_account(CONFIG, options, now).pages(page, least=limits.least, most=limits.most)

    check_start(CONFIG, options, edge, ARCHES[arch], WEIGHTS)
    assert pages(loaded(edge)) == need
    with pytest.raises(NotEnoughMemoryError, match="short"):
        check_start(CONFIG, options, less(edge, 1), ARCHES[arch], WEIGHTS)
    with pytest.raises(NotEnoughMemoryError, match="at least"):
        pages(loaded(less(edge, 1)))


def test_a_reserve_that_a_person_names_is_used_by_both() -> None:
    options, state = EngineOptions(reserve_gib=0.5), MACHINES["unified"][1]
    assert memory_account(CONFIG, options, state).reserve == GIB // 2
    assert check_start(CONFIG, options, state, ARCHES["sm121"], WEIGHTS).reserve == GIB // 2


def test_a_kv_memory_that_a_person_names() -> None:
    state = MACHINES["discrete"][1]
    limits = page_limits(CONFIG, EngineOptions(kv_gib=1.0), state, PAGE)
    assert limits.least == limits.most == GIB // PAGE
    with pytest.raises(UsageError, match=r"--kv-memory 0\.001.* 2\.2 MiB"):
        page_limits(CONFIG, EngineOptions(kv_gib=0.001), state, PAGE)
    with pytest.raises(NotEnoughMemoryError, match=r"KV cache 100\.00 GiB"):
        check_start(CONFIG, EngineOptions(kv_gib=100.0), state, ARCHES["sm90"], WEIGHTS)


def test_large_steps_only_where_there_is_room() -> None:
    rows = {name: rows_per_step(EngineOptions(), state) for name, (_, state) in MACHINES.items()}
    assert rows == {"discrete": 8192, "unified": 2048, "cpu": 256}
    assert rows_per_step(EngineOptions(max_rows_per_step=77), MACHINES["cpu"][1]) == 77
    beside = {name: rows_with_decode(EngineOptions(), rows[name], state) for name, (_, state) in MACHINES.items()}
    assert beside == {"discrete": 704, "unified": 2048, "cpu": 64}
    assert rows_with_decode(EngineOptions(), 7, MACHINES["cpu"][1]) == 7
    assert rows_with_decode(EngineOptions(max_rows_with_decode=2048), 8192, MACHINES["discrete"][1]) == 2048
    assert rows_with_decode(EngineOptions(max_rows_with_decode=2048), 256, MACHINES["cpu"][1]) == 256
    burst = {name: rows_in_burst(EngineOptions(), rows[name], state) for name, (_, state) in MACHINES.items()}
    assert burst == {"discrete": 2816, "unified": 2048, "cpu": 64}
    large = MACHINES["discrete"][1]
    assert rows_in_burst(EngineOptions(), 1024, large) == 1024
    assert rows_in_burst(EngineOptions(max_rows_with_decode=704), 8192, large) == 704, "the gap was chosen"
    assert rows_in_burst(EngineOptions(max_rows_in_burst=4096), 8192, large) == 4096
    assert rows_in_burst(EngineOptions(max_rows_in_burst=4096), 2048, large) == 2048
    assert rows_in_burst(EngineOptions(max_rows_in_burst=64), 8192, large) == 704
    assert workspace(CONFIG, 8192) / GIB == pytest.approx(2.0, abs=0.1)


def test_the_engine_makes_the_pages_that_the_account_says(monkeypatch: pytest.MonkeyPatch) -> None:
    name = resolve_model("random:small")
    model = load_model(name, page_size=16)
    options = EngineOptions(max_context=256, max_seqs=8, page_size=16, reserve_gib=0.25)
    free = GIB // 4 + workspace(model.config, CPU_ROWS)
    limits = page_limits(model.config, options, MemoryState(total=GIB, available=1 << 40), model.page_bytes)
    state = MemoryState(total=GIB, available=free + (limits.least + 3) * model.page_bytes)
    monkeypatch.setattr(build, "read_memory", lambda device: state)
    core, info, _ = build.core_for(model, tokenizer_of(name), options)
    expected = page_limits(model.config, options, state, model.page_bytes)
    assert info.details["kv"]["pages"] == min(limits.least + 3, expected.most)
    assert core.stats().kv_pages_total == info.details["kv"]["pages"] - 1
    assert info.details["device_id"] == "cpu"


def test_prefix_memory_is_pages_on_a_cpu_and_copies_on_a_gpu() -> None:
    cpu, gpu, unified = MemoryState(total=64 * GIB, available=32 * GIB), MACHINES["discrete"][1], MACHINES["unified"][1]
    default, named, off = EngineOptions(), EngineOptions(prefix_memory=GIB), EngineOptions(prefix_memory=0)
    pages = {options.prefix_memory: page_limits(CONFIG, options, cpu, PAGE).most for options in (default, named, off)}
    assert (pages[None] - pages[0], pages[GIB] - pages[0]) == (8 * GIB // PAGE, GIB // PAGE)
    assert page_limits(CONFIG, named, cpu, PAGE).least == page_limits(CONFIG, off, cpu, PAGE).least
    assert [host_tier(o, cpu) for o in (default, named, off)] == [0, 0, 0]
    assert [host_tier(o, gpu) for o in (named, off)] == [GIB, 0]
    assert 0 < host_tier(default, gpu) <= min(8 * GIB, gpu.available // 4)
    assert host_tier(named, unified) == 0, "the pages take what is free there"
    fixed = EngineOptions(kv_gib=1.0, prefix_memory=GIB)
    assert (page_limits(CONFIG, fixed, cpu, PAGE).most, host_tier(fixed, cpu)) == (GIB // PAGE, GIB)
    assert host_tier(EngineOptions(kv_gib=1.0), cpu) == 0
    assert host_tier(EngineOptions(prefix_cache=False, prefix_memory=GIB), gpu) == 0
