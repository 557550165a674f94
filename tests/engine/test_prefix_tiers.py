"""Prefixes in host memory and on disk: the tokens are those of a core that computes everything."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary, oracle, random_prompt
from fake_core import GREEDY, Got, collect, drain, tokens_of

from halfbyte.engine import prefix_tiers
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore, LaunchedStep
from halfbyte.engine.prefix_tiers import PrefixTiers
from halfbyte.engine.request import Request, SamplingParams, Usage
from halfbyte.kv.file_layer import FileLayer
from halfbyte.kv.pages import End, PageRef
from halfbyte.kv.prefix_store import PrefixStore
from halfbyte.kv.segments import HEAD_BYTES, PageLayout

PAGE, WINDOW = 4, 8
PAGE_BYTES = PAGE * 8
LAYOUT = PageLayout(b"a fake's identity"[:16], PAGE_BYTES, PAGE)


class UnsyncedFiles(FileLayer):
    """A small folder has many small segments, and a busy disk takes long to store each."""

    def sync(self, fd: int) -> None:
        pass


def make(
    folder: Path | None = None, memory: int = 0, pages: int = 100, disk: int = 1 << 20, **kw: object
) -> EngineCore:
    settings = {"max_seqs": 8, "max_rows_per_step": 32, "max_context": 512, "run_ahead": False, **kw}
    config = EngineConfig(pages=pages, page_size=PAGE, window=WINDOW, vocab=VOCAB, eos_tokens=(EOS,), **settings)  # type: ignore[arg-type]
    runner = FakeRunner(pages, PAGE, WINDOW, on_host=config.host_steps)
    core = EngineCore(runner, config, FakeVocabulary())
    store = None if folder is None else PrefixStore(folder, LAYOUT, disk, files=UnsyncedFiles())
    tiers = PrefixTiers(runner, PAGE_BYTES, memory, store)
    tiers.computed = lambda rows, depth, seconds: None  # type: ignore[method-assign]  # a test says what is faster
    core.attach(tiers)
    return core


def run(core: EngineCore, *requests: Request, stores_all: bool = False) -> dict[str, Usage]:
    """Serve the requests and wait until their pages are stored; every token is compared. `stores_all`: no page is
    handed out before it was copied, as it may be where steps are as short as a fake's."""
    tiers, on_end = core.tiers, core.pages.on_end
    assert tiers is not None
    assert on_end is not None

    def save(refs: list[PageRef], end: End) -> None:
        on_end(refs, end)
        assert tiers.settle(20)

    for request in requests:
        core.submit(request)
    core.pages.on_end = save if stores_all else on_end
    out = drain(core)
    core.pages.on_end = on_end
    assert tiers.settle(20)
    usages = {}
    for request in requests:
        deltas = out[request.id, 0]
        length = len(request.prompt) + (request.sampling.max_tokens or 0)
        assert tokens_of(deltas) == oracle(request, 0, length, WINDOW)[0], request.id
        assert deltas[-1].usage is not None
        usages[request.id] = deltas[-1].usage
    return usages


def ask(prompt: list[int], id: str, tokens: int = 6, scope: str = "") -> Request:
    return Request(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), id=id, scope=scope)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_prompt_is_found_on_the_disk_after_a_restart(tmp_path: Path, run_ahead: bool) -> None:
    prompt = random_prompt(random.Random(1), 90, 90)
    first = make(tmp_path / "p", run_ahead=run_ahead)
    assert run(first, ask(prompt, "cold"))["cold"].cached_tokens == 0
    first.close()
    second = make(tmp_path / "p", run_ahead=run_ahead)
    usage = run(second, ask(prompt, "warm"))["warm"]
    assert (usage.cached_tokens, usage.disk_tokens, usage.memory_tokens) == (88, 88, 0)
    stats = second.stats()
    assert (stats.prefix_disk_tokens, stats.prefix_hit_tokens) == (88, 88)
    assert second.runner.computed_rows < 12  # type: ignore[attr-defined]
    usage = run(second, ask(prompt, "again"))["again"]
    assert (usage.cached_tokens, usage.disk_tokens) == (88, 0), "the pages have it now"
    second.close()


def test_an_answer_is_found_as_part_of_the_next_prompt(tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(2), 40, 40)
    first = make(tmp_path / "p")
    run(first, ask(prompt, "a", tokens=30))
    answer = oracle(ask(prompt, "a", tokens=30), 0, 70, WINDOW)[0]
    first.close()
    second = make(tmp_path / "p")
    usage = run(second, ask(prompt + answer + [5, 6], "b"))["b"]
    assert usage.disk_tokens == 68
    second.close()


def test_what_the_pages_evicted_is_found_in_memory() -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, 60, 60) for _ in range(8)]
    core = make(memory=1 << 20, pages=60)
    for i, prompt in enumerate(prompts):
        run(core, ask(prompt, f"first {i}"))
    usages = [run(core, ask(prompt, f"second {i}"))[f"second {i}"] for i, prompt in enumerate(prompts)]
    assert all(u.cached_tokens == 56 for u in usages)
    assert sum(u.memory_tokens for u in usages) > 300
    assert core.stats().prefix_memory_bytes > 0
    core.close()


def test_host_memory_is_bounded() -> None:
    rng = random.Random(4)
    core = make(memory=20 * PAGE_BYTES, pages=60)
    for i in range(10):
        run(core, ask(random_prompt(rng, 60, 60), f"r{i}"))
        assert core.stats().prefix_memory_bytes <= 20 * PAGE_BYTES
    core.close()


def test_a_preempted_sequence_takes_its_pages_from_memory() -> None:
    """Three sequences that outgrow the pages together: one is preempted, and what it had is not computed again."""
    rows = {}
    for memory in (0, 1 << 20):
        rng = random.Random(5)
        core = make(memory=memory, pages=64)
        requests = [ask(random_prompt(rng, 30, 30), f"r{i}", tokens=90) for i in range(3)]
        for request in requests:
            core.submit(request)
        out: Got = {}
        while core.has_work:
            collect(core.step(), out)
            assert core.tiers is not None
            assert core.tiers.settle(20)  # copies are made before the next step can evict
        for request in requests:
            assert tokens_of(out[request.id, 0]) == oracle(request, 0, 120, WINDOW)[0]
        assert core.stats().preemptions > 0
        rows[memory] = core.runner.computed_rows  # type: ignore[attr-defined]
        assert (core.stats().prefix_memory_tokens > 0) == bool(memory)
        core.close()
    assert rows[1 << 20] < rows[0]


@pytest.mark.parametrize("rows", [None, 1e12], ids=["unknown", "faster"])
def test_pages_of_a_preempted_sequence_are_kept_before_the_next_step(rows: float | None) -> None:
    """The thread that copies never runs: what is kept was copied when the sequence was preempted, unless computing is
    faster."""
    rng = random.Random(5)
    core = make(memory=1 << 20, pages=64)
    tiers = core.tiers
    assert tiers is not None
    tiers._copier.put = lambda item, *, first=False, always=False: True  # type: ignore[method-assign]
    requests = [ask(random_prompt(rng, 30, 30), f"r{i}", tokens=90) for i in range(3)]
    for request in requests:
        core.submit(request)
    out: Got = {}
    while core.has_work:
        tiers.speeds.rows = rows
        collect(core.step(), out)
    for request in requests:
        assert tokens_of(out[request.id, 0]) == oracle(request, 0, 120, WINDOW)[0]
    assert core.stats().preemptions > 0
    assert (core.stats().prefix_memory_bytes > 0) == (core.stats().prefix_memory_tokens > 0) == (rows is None)
    core.close()


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_agents_find_all_that_the_tiers_have(tmp_path: Path, memory: int) -> None:
    """Ten conversations on pages for half of them. None is admitted while its pages, or those of one before it, could
    still be brought up."""
    rng = random.Random(21)
    histories = [random_prompt(rng, 61, 61) for _ in range(10)]
    core = make(None if memory else tmp_path / "p", memory=memory, pages=130, max_seqs=10)
    for turn in range(4):
        requests = [ask(history, f"{turn}/{i}", tokens=3) for i, history in enumerate(histories)]
        usages = run(core, *requests, stores_all=True)
        for i, request in enumerate(requests):
            expected = 0 if turn == 0 else (len(request.prompt) - 7) // PAGE * PAGE
            assert usages[request.id].cached_tokens >= expected, request.id
            answer = oracle(request, 0, len(request.prompt) + 3, WINDOW)[0]
            histories[i] = request.prompt + answer + random_prompt(rng, 5, 5)
    assert core.stats().preemptions == 0
    core.close()


def test_what_the_disk_has_is_read_while_a_sequence_waits_for_room(tmp_path: Path) -> None:
    rng = random.Random(22)
    prompts = [random_prompt(rng, 60, 60) for _ in range(2)]
    core = make(tmp_path / "p")
    run(core, ask(prompts[1], "before"))
    core.close()
    core = make(tmp_path / "p", pages=48)
    tiers = core.tiers
    assert tiers is not None
    core.submit(ask(prompts[0], "a", tokens=20))
    core.submit(ask(prompts[1], "b"))
    out: Got = {}
    collect(core.step(), out)
    restore = next(r for seq, r in tiers._restores.items() if seq.request.id == "b")
    end = time.monotonic() + 20
    while restore.pending and time.monotonic() < end:
        time.sleep(0.01)
    assert restore.need == 0, "it cannot be admitted yet"
    assert len(restore.ready) == 14 + 2, "all but the last page, and a window"
    reads: list[bytes] = []
    assert tiers.store is not None
    tiers.store.read = lambda key: reads.append(key)  # type: ignore[assignment, method-assign, return-value]
    drain(core, out)
    assert out["b", 0][-1].usage is not None
    assert out["b", 0][-1].usage.disk_tokens == 56
    assert not reads
    core.close()


@pytest.mark.parametrize("ahead", [0, 8])
def test_reading_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    monkeypatch.setattr(prefix_tiers, "AHEAD_BYTES", ahead * PAGE_BYTES)
    rng = random.Random(23)
    prompts = [random_prompt(rng, 60, 60) for _ in range(6)]
    core = make(tmp_path / "p")
    run(core, *(ask(p, f"a{i}") for i, p in enumerate(prompts)), stores_all=True)
    core.close()
    core = make(tmp_path / "p", pages=48, max_seqs=4)
    tiers = core.tiers
    assert tiers is not None
    for i, prompt in enumerate(prompts):
        core.submit(ask(prompt, f"b{i}"))
    out: Got = {}
    most = 0
    while core.has_work:
        collect(core.step(), out)
        most = max(most, sum(len(r.ready) for r in list(tiers._restores.values())))
    assert bool(ahead) <= most <= ahead * 1.5 + 2 * prefix_tiers.READERS, "both parts, and what each reader had begun"
    for i, prompt in enumerate(prompts):
        assert tokens_of(out[f"b{i}", 0]) == oracle(ask(prompt, ""), 0, 66, WINDOW)[0]
        usage = out[f"b{i}", 0][-1].usage
        assert usage is not None
        assert usage.cached_tokens == 56
    core.close()


def test_speeds_are_measured_when_the_tiers_are_attached(tmp_path: Path) -> None:
    core = make(tmp_path / "p")
    run(core, ask(random_prompt(random.Random(24), 60, 60), "a"))
    core.close()
    core = make(tmp_path / "p")
    assert core.tiers is not None
    speeds, guess = core.tiers.speeds, prefix_tiers.Speeds()
    assert all(getattr(speeds, name) != getattr(guess, name) > 0 for name in ("down", "up", "disk"))
    assert speeds.rows is None
    core.close()


def test_what_is_slower_to_read_than_to_compute_is_computed(tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(6), 60, 60)
    core = make(tmp_path / "p", memory=1 << 20)
    run(core, ask(prompt, "a"))
    core.close()
    core = make(tmp_path / "p")
    assert core.tiers is not None
    core.tiers.speeds.rows, core.tiers.speeds.disk = 1e9, 1.0
    assert run(core, ask(prompt, "b"))["b"].cached_tokens == 0
    core.close()
    core = make(tmp_path / "p")
    assert core.tiers is not None
    core.tiers.speeds.rows = 1.0
    assert run(core, ask(prompt, "c"))["c"].disk_tokens == 56
    core.close()


def test_deep_tokens_of_a_prompt_count_as_slower(tmp_path: Path) -> None:
    """By the speed at its beginning the prompt would be computed; its end takes three times as long, so it is read."""
    prompt = random_prompt(random.Random(6), 60, 60)
    core = make(tmp_path / "p", memory=1 << 20)
    run(core, ask(prompt, "a"))
    core.close()
    for doubling_depth, disk_tokens in ((math.inf, 0), (14.0, 56)):
        core = make(tmp_path / "p")
        tiers = core.tiers
        assert tiers is not None
        tiers._doubling_depth = doubling_depth
        # 14 pages are read in 2 s; 56 tokens are computed in 1 s without depth, in 3 s with it.
        tiers.speeds.rows, tiers.speeds.disk, tiers.speeds.up = 56.0, 14 * PAGE_BYTES / 2.0, 1e12
        assert run(core, ask(prompt, "b"))["b"].disk_tokens == disk_tokens
        core.close()


def test_a_measured_speed_is_that_at_the_beginning_of_a_prompt(tmp_path: Path) -> None:
    core = make(tmp_path / "p")
    tiers = core.tiers
    assert tiers is not None
    tiers._doubling_depth = 1000.0
    prefix_tiers.PrefixTiers.computed(tiers, 500, 1500.0, 1.0)
    assert tiers.speeds.rows == 1250.0
    core.close()


def test_scopes_find_none_of_each_other_s_prefixes(tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(7), 60, 60)
    core = make(tmp_path / "p", memory=1 << 20)
    run(core, ask(prompt, "a", scope="one"))
    assert run(core, ask(prompt, "b", scope="two"))["b"].cached_tokens == 0
    assert run(core, ask(prompt, "c"))["c"].cached_tokens == 0
    core.close()
    core = make(tmp_path / "p")
    assert run(core, ask(prompt, "d", scope="three"))["d"].cached_tokens == 0
    assert run(core, ask(prompt, "e", scope="one"))["e"].disk_tokens == 56
    core.close()


def test_a_damaged_folder_costs_only_time(tmp_path: Path) -> None:
    rng = random.Random(8)
    prompts = [random_prompt(rng, 60, 60) for _ in range(6)]
    core = make(tmp_path / "p")
    run(core, *(ask(p, f"a{i}") for i, p in enumerate(prompts)))
    core.close()
    for path in (tmp_path / "p").glob("*.prefix"):
        data = bytearray(path.read_bytes())
        for _ in range(12):
            data[rng.randrange(64, len(data))] ^= 0xFF
        path.write_bytes(data)
    core = make(tmp_path / "p")
    run(core, *(ask(p, f"b{i}") for i, p in enumerate(prompts)))
    assert core.stats().prefix_damaged > 0
    core.close()


def test_a_request_cancelled_while_its_pages_are_read_leaves_nothing(tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(9), 60, 60)
    core = make(tmp_path / "p")
    run(core, ask(prompt, "a"))
    core.close()
    core = make(tmp_path / "p")
    core.submit(ask(prompt, "b"))
    core.step()
    core.cancel("b")
    drain(core)
    assert run(core, ask(prompt, "c"))["c"].cached_tokens == 56
    core.close()


def test_a_forgotten_sequence_is_not_found_again(tmp_path: Path) -> None:
    prompt = random_prompt(random.Random(10), 60, 60)
    core = make(tmp_path / "p", memory=1 << 20)
    core.submit(ask(prompt, "a"))
    while not core.scheduler.running or core.scheduler.running[0].tables.length < 60:
        core.step()
    assert core.tiers is not None
    seq = core.scheduler.running[0]
    core.tiers.forget(seq.tables.hashes.copy())
    core.pages.forget(seq.tables)
    core.cancel("a")
    drain(core)
    assert core.tiers.settle(20)
    core.close()
    core = make(tmp_path / "p")
    assert run(core, ask(prompt, "b"))["b"].cached_tokens == 0
    core.close()


def test_a_full_folder_keeps_the_last_prompts_and_those_that_come_again(tmp_path: Path) -> None:
    """The end of a sequence is no use of its pages, or a prompt that was asked once would outlive the next."""
    rng = random.Random(25)
    prompts = [random_prompt(rng, 60, 60) for _ in range(12)]
    room = 90 * (PAGE_BYTES + HEAD_BYTES)  # of which a prompt and its answer take 20 or so
    core = make(tmp_path / "p", disk=room)
    for i, prompt in enumerate(prompts):
        run(core, ask(prompt, f"a{i}"))
        run(core, ask(prompts[0], f"again {i}"))
    core.close()
    core = make(tmp_path / "p", disk=room)
    assert core.tiers is not None
    assert core.tiers.store is not None
    usages = [run(core, ask(prompts[i], f"b{i}"))[f"b{i}"] for i in (11, 10, 0, 5)]
    assert [u.disk_tokens for u in usages] == [56, 56, 56, 0]
    core.close()


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_copy_that_is_under_way_when_its_sequence_is_forgotten_is_not_stored(tmp_path: Path, memory: int) -> None:
    prompt = random_prompt(random.Random(11), 60, 60)
    core = make(tmp_path / "p", memory=memory)
    tiers = core.tiers
    assert tiers is not None
    read_pages, reads, forgotten = tiers._read_pages, threading.Event(), threading.Event()

    def slow(refs: list[PageRef], behind: object) -> list[memoryview | None]:
        contents = read_pages(refs, behind)
        reads.set()
        assert forgotten.wait(20)
        return contents

    tiers._read_pages = slow  # type: ignore[method-assign]
    core.submit(ask(prompt, "a"))
    while not core.scheduler.running or core.scheduler.running[0].tables.length < 60:
        core.step()
    assert reads.wait(20)
    tables = core.scheduler.running[0].tables
    tiers.forget(tables.hashes.copy())
    forgotten.set()
    assert tiers.settle(20)
    core.pages.forget(tables)
    core.cancel("a")
    drain(core)
    assert tiers.settle(20)
    assert core.stats().prefix_memory_bytes == 0
    core.close()
    core = make(tmp_path / "p")
    assert run(core, ask(prompt, "b"))["b"].cached_tokens == 0
    core.close()


@pytest.mark.parametrize("seed", range(6))
def test_conversations_that_exceed_the_pages(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of several clients in turns, with shared beginnings, cancels and preemption; restarts in between. Every
    token is compared."""
    rng = random.Random(seed)
    monkeypatch.setattr(prefix_tiers, "AHEAD_BYTES", rng.choice([0, 6 * PAGE_BYTES, 1 << 20]))
    monkeypatch.setattr(prefix_tiers, "MOVE_BYTES", rng.choice([PAGE_BYTES, 1 << 20]))
    shared = random_prompt(rng, 30, 30)
    conversations = [shared + random_prompt(rng, 5, 20) for _ in range(6)]
    core: EngineCore | None = None
    for turn in range(5):
        if core is None or rng.random() < 0.4:
            if core is not None:
                core.close()
            core = make(
                tmp_path / "p" if seed % 3 else None, memory=rng.choice([0, 40 * PAGE_BYTES, 1 << 20]), pages=90,
                disk=rng.choice([1 << 20, 4000]), run_ahead=seed % 2 == 0, max_seqs=4,
            )  # fmt: skip
        requests = [ask(c, f"{turn}/{i}", tokens=rng.randrange(1, 20)) for i, c in enumerate(conversations)]
        requests = [replace(request, client=rng.choice(["", "a", "b"])) for request in requests]
        assert core.tiers is not None
        core.tiers.speeds.rows = rng.choice([None, None, 1e6])
        for request in requests:
            core.submit(Request(request.prompt[:-3] + [7] * 20, GREEDY, id=f"gone {request.id}"))
            if rng.random() < 0.7:
                collect(core.step(), {})
            core.cancel(f"gone {request.id}")
        run(core, *requests)
        for i, request in enumerate(requests):
            length = len(request.prompt) + (request.sampling.max_tokens or 0)
            conversations[i] = request.prompt + oracle(request, 0, length, WINDOW)[0] + random_prompt(rng, 1, 8)
    assert core is not None
    core.close()


@pytest.mark.parametrize("run_ahead", [True, False])
def test_prompts_are_timed_by_steps_that_have_run(run_ahead: bool) -> None:
    """A GPU has not run a step without results when it is committed: its rows are timed with the next results."""
    core = make(memory=1 << 20, run_ahead=run_ahead, max_rows_per_step=32)
    tiers = core.tiers
    assert tiers is not None
    timed: list[tuple[int, float, float]] = []
    tiers.computed = lambda rows, depth, seconds: timed.append((rows, depth, seconds))  # type: ignore[method-assign]
    now = [0.0]
    core._clock = lambda: now[0]
    commit = core._commit

    def slow(launched: LaunchedStep) -> None:
        now[0] += 5.0 if launched.step.results else 0.001
        commit(launched)

    core._commit = slow  # type: ignore[method-assign]
    core.submit(ask(random_prompt(random.Random(31), 100, 100), "a"))
    drain(core)
    assert sum(rows for rows, _, _ in timed) == 100
    assert sum(rows * depth for rows, depth, _ in timed) == pytest.approx(100 * 50)
    assert all(rows / seconds < 100 / 5 + 1 for rows, _, seconds in timed), timed
    core.close()
