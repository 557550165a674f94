"""The account of memory: where its figures come from on each kind of machine, and refusals that carry their numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from halfbyte import memory
from halfbyte.errors import NotEnoughMemoryError, UsageError
from halfbyte.memory import GIB, MemoryAccount, MemoryState, cgroup_limits, parse_size, read_memory, read_pressure

UNIFIED = MemoryState(total=119 * GIB, available=70 * GIB, unified=True)
DISCRETE = MemoryState(total=64 * GIB, available=8 * GIB, device_total=96 * GIB, device_free=90 * GIB)
PAGE_120B = 18 * 2 * 8 * 64 * 64 * 2  # 18 layers of a kind, keys and values, 8 heads, 64 tokens of 64 bf16


def account(weights: int, workspace: int = 2, reserve: int = 2, state: MemoryState = UNIFIED) -> MemoryAccount:
    return MemoryAccount(state, weights * GIB, workspace * GIB, reserve * GIB)


# ---- the account -------------------------------------------------------------------------------------------------


def test_an_account_that_fits() -> None:
    account(60).check(4 * GIB)
    account(60).check(6 * GIB)
    with pytest.raises(NotEnoughMemoryError):
        account(60).check(6 * GIB + 1)


def test_one_that_does_not_fit_names_the_flag_and_the_numbers() -> None:
    with pytest.raises(NotEnoughMemoryError) as e:
        account(60).check(16 * GIB)
    for part in (
        "60.00 GiB",
        "16.00 GiB",
        "78.00 GiB",
        "MemAvailable 70.00 GiB",
        "10.00 GiB short",
        "--kv-memory 6.0 ",
    ):
        assert part in str(e.value)


def test_the_flag_that_is_advised_fits() -> None:
    tight = MemoryAccount(UNIFIED, 60 * GIB, 2 * GIB, 8 * GIB - int(1.98 * GIB))
    with pytest.raises(NotEnoughMemoryError, match=r"--kv-memory 1\.9 "):
        tight.check(2 * GIB)
    tight.check(int(1.9 * GIB))


def test_a_model_that_cannot_fit_at_all() -> None:
    with pytest.raises(NotEnoughMemoryError, match="smaller model"):
        account(69).check(16 * GIB)


def test_a_discrete_gpu_counts_its_own_memory() -> None:
    account(60, state=DISCRETE).check(16 * GIB)
    full = MemoryState(total=64 * GIB, available=60 * GIB, device_total=96 * GIB, device_free=20 * GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"free on the GPU 20\.00 GiB"):
        account(60, state=full).check(16 * GIB)


def test_pages_leave_workspace_and_reserve_alone() -> None:
    state = MemoryState(total=128 * GIB, available=10 * GIB)
    assert state.reserve == 8 * GIB
    plan = MemoryAccount(state, 0, GIB // 2, state.reserve)
    pages = plan.pages(PAGE_120B, least=1, most=1 << 20)
    assert pages * PAGE_120B <= 3 * GIB // 2 < (pages + 1) * PAGE_120B
    assert plan.pages(PAGE_120B, least=1, most=5) == 5


def test_a_refusal_of_pages_has_the_numbers() -> None:
    plan = MemoryAccount(MemoryState(total=128 * GIB, available=10 * GIB), 0, GIB, 8 * GIB)
    match = r"at least 4096 pages of 2\.2 MiB = 9\.00 GiB.*MemAvailable is 10\.00 GiB, of which 1\.00 .* and 8\.00"
    with pytest.raises(NotEnoughMemoryError, match=match):
        plan.pages(PAGE_120B, least=4096, most=4096)


@pytest.mark.parametrize(
    ("state", "reserve", "floor"),
    [
        (MemoryState(total=128 * GIB, available=GIB), 8, 2),  # a CPU
        (MemoryState(total=8 * GIB, available=GIB), 2, 1),
        (MemoryState(total=128 * GIB, available=GIB, unified=True), 8, 2),
        (MemoryState(total=32 * GIB, available=GIB, unified=True), 2, 1),
        (MemoryState(total=512 * GIB, available=GIB, device_total=160 * GIB, device_free=GIB), 4, 2),
        (MemoryState(total=512 * GIB, available=GIB, device_total=24 * GIB, device_free=GIB), 1, 2),
    ],
)
def test_one_policy_for_what_stays_free(state: MemoryState, reserve: int, floor: int) -> None:
    assert (state.reserve, state.floor(state.reserve)) == (reserve * GIB, floor * GIB)
    if state.shared:  # or a server that fits exactly would shed everybody
        assert state.floor(state.reserve) < state.reserve


def test_no_reserve_still_leaves_a_watchdog_something_to_watch() -> None:
    assert UNIFIED.floor(0) == GIB // 4
    assert DISCRETE.floor(0) == 2 * GIB


def test_a_server_ends_before_the_machine_swaps_where_that_helps() -> None:
    assert UNIFIED.last(8 * GIB) == GIB  # half of what it keeps free
    assert UNIFIED.last(0) == GIB // 8
    assert DISCRETE.last(8 * GIB) == 0  # the weights are on the card: the host would get little back


def test_where_the_page_cache_is_in_the_way() -> None:
    assert UNIFIED.crowded
    assert not DISCRETE.crowded
    assert not MemoryState(total=64 * GIB, available=GIB).crowded
    assert MemoryState(total=64 * GIB, available=GIB, limited=True).crowded


# ---- reading the machine -----------------------------------------------------------------------------------------


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    state = read_memory()
    assert 0 < state.available <= state.total
    assert state.resident > 0
    assert (state.free, state.size, state.on_gpu) == (state.available, state.total, False)
    psi = tmp_path / "memory"
    psi.write_text("some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    assert read_pressure(psi) == 0.125
    assert read_pressure(tmp_path / "absent") is None


def card(monkeypatch: pytest.MonkeyPatch, *, integrated: bool, nvml: bool = True) -> list[int]:
    """A GPU of 96 GiB; returns the indices that CUDA itself was asked for."""
    asked: list[int] = []

    def by_cuda(index: int) -> tuple[int, int]:
        asked.append(index)
        return 69 * GIB, 95 * GIB

    def handler(index: int) -> str:
        if not nvml:
            raise RuntimeError("no library")
        return f"card {index}"

    module = ModuleType("pynvml")
    figures = {"card 1": SimpleNamespace(total=96 * GIB, free=70 * GIB)}
    module.nvmlDeviceGetMemoryInfo = figures.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", handler)
    monkeypatch.setattr(torch.cuda, "mem_get_info", by_cuda)
    properties = SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    memory.is_unified.cache_clear()
    return asked


@pytest.fixture(autouse=True)
def _forget_cards() -> object:
    yield
    memory.is_unified.cache_clear()


def test_a_discrete_card_is_asked_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = card(monkeypatch, integrated=False)
    state = read_memory("cuda:1")
    assert (state.free, state.size, state.shared, state.unified) == (70 * GIB, 96 * GIB, False, False)
    assert asked == []  # CUDA would have made a context, half a gigabyte of the card


def test_a_card_without_nvml_is_asked_through_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = card(monkeypatch, integrated=False, nvml=False)
    state = read_memory(torch.device("cuda"))
    assert (state.free, state.size, asked) == (69 * GIB, 95 * GIB, [0])


def test_unified_memory_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, integrated=True)
    state = read_memory("cuda")
    assert (state.unified, state.on_gpu, state.device_free) == (True, True, None)
    assert (state.free, state.size) == (state.available, state.total)


def test_a_model_on_the_cpu_does_not_care_for_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, integrated=False)
    state = read_memory("cpu")
    assert (state.on_gpu, state.device_free) == (False, None)


# ---- cgroups -----------------------------------------------------------------------------------------------------


def group(
    folder: Path, limit: str, used: int, cache: int, *, version: int, active: int = 0, mapped: int = 0, dirty: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    names = {"mapped": "file_mapped", "dirty": "file_dirty", "writeback": "file_writeback"}
    if version == 1:
        names = {"mapped": "total_mapped_file", "dirty": "total_dirty", "writeback": "total_writeback"}
    total = "" if version == 2 else "total_"
    stat = {
        f"{total}inactive_file": cache,
        f"{total}active_file": active,
        names["mapped"]: mapped,
        names["dirty"]: dirty,
    }
    stat |= {names["writeback"]: 0, "anon": 5}
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


def test_cgroups_of_version_two_limit_by_every_parent(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/a/b\n")
    group(root / "a", str(10 * GIB), 4 * GIB, GIB, version=2)
    group(root / "a" / "b", "max", 4 * GIB, GIB, version=2)
    assert list(cgroup_limits(own, root)) == [(10 * GIB, 7 * GIB)]


def test_cgroups_of_version_one_in_a_container(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "fs"
    own.write_text("5:cpu:/x\n4:memory:/docker/abc\n")
    group(root / "memory", str(3 * GIB), 2 * GIB, 0, version=1)  # the path itself is the host's and not mounted here
    assert list(cgroup_limits(own, root)) == [(3 * GIB, GIB)]


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_counts_as_left_but_for_what_is_mapped_or_unwritten(tmp_path: Path, version: int) -> None:
    """A file that was read twice is "active"; the kernel drops it all the same before it refuses memory."""
    own, root = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/a\n" if version == 2 else "4:memory:/a\n")
    folder = root / "a" if version == 2 else root / "memory" / "a"
    group(folder, str(16 * GIB), 14 * GIB, 2 * GIB, version=version, active=10 * GIB)
    assert list(cgroup_limits(own, root)) == [(16 * GIB, 14 * GIB)]
    group(folder, str(16 * GIB), 14 * GIB, 2 * GIB, version=version, active=10 * GIB, mapped=3 * GIB, dirty=GIB)
    assert list(cgroup_limits(own, root)) == [(16 * GIB, 10 * GIB)]


def test_no_cgroups(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []


def test_a_cgroup_below_the_machine_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_memory()
    limit, left = whole.total // 2, whole.available // 3
    monkeypatch.setattr(memory, "cgroup_limits", lambda: [(limit, left)])
    state = read_memory()
    assert (state.total, state.available, state.source) == (limit, left, "free in the cgroup")
    monkeypatch.setattr(memory, "cgroup_limits", lambda: [(1 << 62, 1 << 61)])  # version one's way to say "no limit"
    state = read_memory()
    assert (state.total, state.limited) == (whole.total, False)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("0", 0),
        ("1.5 gib", 3 << 29),
        ("500MB", 500_000_000),
        ("2g", 2 << 30),
        ("0.0", 0),
        (None, None),
    ],
)
def test_a_size_as_a_person_types_it(text: str | None, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8", "-1GiB", "8 apples", "GiB", "nan", "1e9GiB"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="GiB"):
        parse_size(text)
