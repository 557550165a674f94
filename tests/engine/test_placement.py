"""Which layers keep their experts in host memory, decided from the account of memory alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfbyte.engine.options import EngineOptions
from halfbyte.engine.placement import HOST_RESERVE, Placement, find_placement
from halfbyte.engine.sizing import check_start, rows_per_step, with_fitting_steps
from halfbyte.errors import NotEnoughMemoryError, UsageError
from halfbyte.explanation import explain
from halfbyte.gates import Gates, parse
from halfbyte.memory import GIB, MemoryState
from halfbyte.model.gpt_oss import choose, page_bytes
from halfbyte.model.load import read_facts, resolve_model
from halfbyte.plan.phase import ARCHES

FACTS = {name: read_facts(resolve_model(f"random:{name}")) for name in ("20b", "120b")}
SM90 = ARCHES["sm90"]


def machine(gpu: float, host: float = 64) -> MemoryState:
    """A GPU of which everything is free, in a machine of which all but 4 GiB are."""
    return MemoryState(
        total=int(host * GIB), available=int((host - 4) * GIB), device_total=int(gpu * GIB), device_free=int(gpu * GIB)
    )


def placed(model: str, memory: MemoryState, context: int = 32768, **flags: str) -> tuple[Placement, EngineOptions]:
    options = EngineOptions(gates=parse(flags, env={}), max_context=context)
    placement = find_placement(FACTS[model], options, memory, SM90)
    return placement, replace(options, gates=placement.gates)


@pytest.mark.parametrize("gpu", [12, 16, 24, 32, 48, 80])
def test_as_few_layers_as_fit(gpu: int) -> None:
    memory = machine(gpu, 96)
    placement, options = placed("120b", memory)
    check_start(FACTS["120b"].config, options, memory, SM90, placement.device_bytes, own_process=False)
    total = FACTS["120b"].weight_bytes(Gates(), SM90)
    assert placement.device_bytes + placement.host_bytes == total
    assert placement.device_bytes < gpu * GIB
    if gpu == 80:
        assert placement.host_layers == 0
        return
    fewer = replace(options, gates=replace(options.gates, experts_in_host=str(placement.host_layers - 1)))
    less = find_placement(FACTS["120b"], fewer, memory, SM90)
    large = replace(fewer, max_rows_per_step=rows_per_step(options, memory))
    with pytest.raises(NotEnoughMemoryError):
        check_start(FACTS["120b"].config, large, memory, SM90, less.device_bytes, own_process=False)


@pytest.mark.parametrize("gpu", [12, 16, 24, 32])
def test_steps_are_smaller_where_the_placement_leaves_less_room(gpu: int) -> None:
    """One layer more on the GPU than with the largest steps: the KV cache of a context still fits."""
    memory, config = machine(gpu, 96), FACTS["120b"].config
    placement, options = placed("120b", memory)
    options = replace(options, gates=replace(options.gates, experts_in_host=str(placement.host_layers - 1)))
    weights = find_placement(FACTS["120b"], options, memory, SM90).device_bytes
    page = page_bytes(config, choose(config, options.gates, SM90).spec)
    try:
        check_start(config, options, memory, SM90, weights, own_process=False)
    except NotEnoughMemoryError:
        assert gpu == 12, "a layer is more than all of the workspace"
        assert with_fitting_steps(config, options, memory, page, weights=weights) is options
        return
    smaller = with_fitting_steps(config, options, memory, page, weights=weights)
    assert 1024 <= rows_per_step(smaller, memory) < rows_per_step(options, memory)
    named = replace(options, max_rows_per_step=rows_per_step(options, memory))
    assert with_fitting_steps(config, named, memory, page, weights=weights) is named


def test_what_people_have() -> None:
    """A card of 24 GB and 64 GB of memory: 120b; one of 12 GB: 20b without help."""
    placement, options = placed("120b", machine(24))
    assert 20 <= placement.host_layers <= 30
    assert placement.host_bytes + HOST_RESERVE < 60 * GIB
    assert "experts of" in placement.line
    assert "GiB" in placement.line
    assert rows_per_step(options, machine(24)) == 8192
    assert rows_per_step(options, machine(12)) == 4096
    assert placed("20b", machine(16))[0].host_layers == 0
    assert placed("20b", machine(8))[0].host_layers > 0
    assert placed("20b", machine(16))[0].line == ""


def test_numbers_are_obeyed() -> None:
    assert placed("120b", machine(141), experts_in_host="26")[0].host_layers == 26
    assert placed("120b", machine(141), experts_in_host="all")[0].host_layers == 36
    assert placed("120b", machine(141), experts_in_host="0")[0].host_layers == 0
    with pytest.raises(UsageError, match="37"):
        placed("120b", machine(141), experts_in_host="37")


def test_the_host_must_have_room() -> None:
    with pytest.raises(NotEnoughMemoryError, match="host memory") as caught:
        placed("120b", machine(24, 32))
    assert "GiB" in str(caught.value)


def test_nothing_fits() -> None:
    placement, options = placed("120b", machine(6, 128))
    assert placement.host_layers == 36
    with pytest.raises(NotEnoughMemoryError):
        check_start(FACTS["120b"].config, options, machine(6, 128), SM90, placement.device_bytes, own_process=False)


def test_one_memory_has_no_choice() -> None:
    unified = MemoryState(total=128 * GIB, available=120 * GIB, unified=True)
    assert placed("120b", unified)[0].host_layers == 0
    with pytest.raises(UsageError, match="leave it out"):
        placed("120b", unified, experts_in_host="4")
    host = MemoryState(total=128 * GIB, available=120 * GIB)
    options = EngineOptions(gates=parse({"experts_in_host": "all"}, env={}))
    with pytest.raises(UsageError, match="leave it out"):
        find_placement(FACTS["20b"], options, host, ARCHES["cpu"])


def test_a_part_of_a_large_gpu() -> None:
    memory = machine(141).limited_to(24 * GIB)
    assert (memory.device_total, memory.device_free) == (24 * GIB, 24 * GIB)
    assert placed("120b", memory)[0].host_layers == placed("120b", machine(24))[0].host_layers
    assert machine(141).limited_to(24 * GIB, used=20 * GIB).device_free == 4 * GIB
    assert machine(16).limited_to(24 * GIB).device_total == 16 * GIB
    with pytest.raises(UsageError, match="gpu-memory"):
        MemoryState(total=GIB, available=GIB).limited_to(GIB)


def test_explain_places_experts_and_plans_for_them() -> None:
    small = explain("random:120b", "4090", False, "halfbyte", Gates())
    (room,) = small.rooms
    assert room.placement.host_layers > 20
    assert f"experts of {room.placement.host_layers} of 36 layers in host memory" in room.verdict
    assert all("hybrid.moe" in phases for phases in small.selection.chosen.values())
    large = explain("random:120b", "h200", False, "halfbyte", Gates())
    assert large.rooms[0].placement.host_layers == 0
    assert not any("hybrid.moe" in phases for phases in large.selection.chosen.values())
    never = explain("random:120b", "4090", False, "halfbyte", parse({"experts_in_host": "0"}, env={}))
    assert "does not fit" in never.rooms[0].verdict
