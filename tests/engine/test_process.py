"""The engine in its own process: a thousand requests, cancels, faults, a kill; every one completes or is told."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_fakes import EOS, VOCAB, FakeRunner, FakeVocabulary, oracle, random_prompt

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import Delta, Request, SamplingParams, SourceInfo
from halfbyte.errors import CapacityError, CheckpointError, EngineDiedError, HalfbyteError, RequestError, UsageError

BUILD = "test_process:build_fake"
POISON = 50


def build_fake(settings: dict, report: Callable[[str], None]) -> tuple[EngineCore, SourceInfo]:
    """Runs in the engine's process."""
    if settings.get("refuse"):
        raise CheckpointError("there is no such model.")
    if once := settings.get("load_once"):
        if Path(once).exists():
            raise CheckpointError("there is no such model any more.")
        Path(once).touch()

    def fault(batch: Batch) -> None:
        if POISON in batch.tokens.tolist() and settings.get("poison"):
            raise RuntimeError("struck")
        if settings.get("trap_on") in batch.tokens.tolist():
            raise EngineDiedError("the GPU failed in a step.")
        if settings.get("die_on") in batch.tokens.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        if settings.get("slow_on") in batch.tokens.tolist():
            time.sleep(12)

    config = EngineConfig(
        pages=400, page_size=8, window=16, vocab=VOCAB, max_context=256, eos_tokens=(EOS,), max_seqs=32,
        max_rows_per_step=128,
        host_steps=bool(settings.get("on_host")),
    )  # fmt: skip
    core = EngineCore(FakeRunner(400, 8, 16, fault=fault), config, FakeVocabulary())
    return core, SourceInfo("fake", 256, VOCAB, (EOS,), {"pid": os.getpid()})


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def opened(settings: dict | None = None, **bounds: object) -> EngineProcess:
    source = EngineProcess(BUILD, settings or {}, **bounds)
    await source.open()
    return source


async def whole(source: EngineProcess, request: Request) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    last: Delta | None = None
    async for delta in source.stream(request):
        tokens += delta.tokens
        last = delta
    assert last is not None
    return tokens, last


def greedy(n: int = 12, **kw: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, **kw)


BAD_VALUES: list[dict[str, object]] = [
    {"temperature": "0.7"}, {"n": 0}, {"n": "2"}, {"stop": "abc"}, {"stop": (1,)}, {"top_k": 1.5}, {"seed": 1 << 70},
    {"seed": "x"}, {"logit_bias": {"1": 2.0}}, {"logit_bias": [1]}, {"max_tokens": True}, {"logprobs": object()},
]  # fmt: skip


async def every_mistyped_value_ends_its_request_only(source: EngineProcess) -> None:
    for values in BAD_VALUES:
        with pytest.raises(RequestError, match="cannot be served"):
            await whole(source, Request([5], SamplingParams(**values)))
    for request in (
        Request("abc"), Request([5], timeout="1"), Request([5], timeout=-1.0), Request(["5"]), Request([1 << 70]),
        Request([5], "greedy"), Request([5], constraint="json"),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            await whole(source, request)
    assert (await whole(source, Request([5, 6, 7], greedy())))[0]
    assert source.deaths == 0


async def test_tokens_come_through_and_a_closed_stream_is_cancelled() -> None:
    source = await opened()
    try:
        assert source.ready
        assert source.info.model == "fake"
        request = Request([5, 6, 7], greedy())
        tokens, last = await whole(source, request)
        assert tokens == oracle(request, 0, 15, 16)[0]
        assert last.usage is not None
        assert source.stats().generated_tokens == len(tokens)
        with pytest.raises(RequestError, match="empty"):
            await whole(source, Request([], greedy()))
        await every_mistyped_value_ends_its_request_only(source)

        stream = source.stream(Request([5, 6], greedy(200, ignore_eos=True)))
        async for _ in stream:
            break
        await stream.aclose()  # cancels
        for _ in range(100):
            await whole(source, Request([9], greedy(1)))
            if source.stats().running == 0:
                break
        assert source.stats().running == 0
        assert source.stats().kv_pages_used == 0
    finally:
        await source.close()
    assert source.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(source.pid, 0)


async def test_loading_errors_reach_the_caller_as_they_are() -> None:
    with pytest.raises(CheckpointError, match="no such model"):
        await opened({"refuse": True})


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


async def test_a_dead_engine_is_started_again_after_growing_pauses_and_given_up_with_the_reason() -> None:
    source = await opened({"die_on": POISON}, restarts=1, first_pause=0.05)
    seen = []
    try:
        for _ in range(2):
            await until(lambda: source.ready)
            with pytest.raises(EngineDiedError, match=r"signal 9.*lost"):
                await whole(source, Request([POISON], greedy()))
            seen.append(source.health())
        assert "(1 of 1)" in seen[0].trouble
        assert "signal 9" in seen[0].trouble
        assert [h.gone for h in seen] == [False, True]
        with pytest.raises(EngineDiedError, match=r"2 times in a row.*not started again.*signal 9"):
            await whole(source, Request([5], greedy()))
    finally:
        await source.close()


async def test_an_engine_that_was_ended_from_outside_is_gone_with_that_reason() -> None:
    source = await opened({"slow_on": POISON}, restarts=8)
    try:
        waiting = asyncio.ensure_future(whole(source, Request([POISON], greedy())))
        await until(lambda: source.stats().running == 1 or bool(source._waiting))
        source.end("another machine is gone.")
        with pytest.raises(EngineDiedError, match="another machine is gone"):
            await waiting
        await until(lambda: source.health().gone)
        assert "another machine is gone" in str(source.health().trouble)
    finally:
        await source.close()


async def test_a_device_that_failed_is_had_again_by_a_new_process() -> None:
    source = await opened({"trap_on": POISON}, restarts=1, first_pause=0.05)
    try:
        first, before = source.pid, await whole(source, Request([5], greedy()))
        with pytest.raises(EngineDiedError, match="the GPU failed in a step"):
            await whole(source, Request([POISON], greedy()))
        await until(lambda: source.ready)
        assert source.pid != first
        assert (await whole(source, Request([5], greedy())))[0] == before[0]
    finally:
        await source.close()


async def test_a_death_after_a_good_while_is_the_first_again() -> None:
    source = await opened({"die_on": POISON}, restarts=1, first_pause=0.05, settled=0.0)
    try:
        for _ in range(2):
            await until(lambda: source.ready)
            with pytest.raises(EngineDiedError):
                await whole(source, Request([POISON], greedy()))
        assert not source.health().gone
    finally:
        await source.close()


async def test_a_death_while_loading_again_is_a_death_and_not_loading_for_ever(tmp_path: Path) -> None:
    once = tmp_path / "started"
    source = await opened({"die_on": POISON, "load_once": str(once)}, restarts=1, first_pause=0.05)
    try:
        with pytest.raises(EngineDiedError):
            await whole(source, Request([POISON], greedy()))
        await until(lambda: source.health().gone)
        assert "there is no such model any more" in source.health().trouble
    finally:
        await source.close()


async def test_a_stopped_engine_is_known_by_the_age_of_its_last_step_and_restarted() -> None:
    source = await opened(hang=2.0, first_pause=0.05)
    try:
        assert source.health().since_step is None  # nothing is asked of it
        first = source.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        lost = asyncio.create_task(whole(source, Request([5, 6], greedy())))
        await until(lambda: (source.health().since_step or 0) > 0.5)
        with pytest.raises(EngineDiedError, match=r"hung.*\d+ s"):
            await lost
        await until(lambda: source.ready)
        assert source.pid != first
        await whole(source, Request([5, 6], greedy()))
    finally:
        await source.close()


@pytest.mark.slow
async def test_an_engine_that_is_stopped_while_it_loads_is_restarted() -> None:
    source = await opened({"die_on": POISON}, hang_loading=15.0, first_pause=0.05)
    try:
        first = source.pid
        with pytest.raises(EngineDiedError):
            await whole(source, Request([POISON], greedy()))
        await until(lambda: source.pid != first)
        second = source.pid
        assert second is not None
        os.kill(second, signal.SIGSTOP)
        await until(lambda: source.ready)
        assert source.pid != second
    finally:
        await source.close()


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [True, False])
async def test_a_long_step_is_no_hang_where_the_process_itself_computes_it(on_host: bool) -> None:
    source = await opened({"slow_on": POISON, "on_host": on_host}, hang=5.0, first_pause=0.05)
    try:
        long = asyncio.create_task(whole(source, Request([POISON], greedy(1))))
        if on_host:
            assert (await long)[1].finish == "length"
            assert source.deaths == 0
        else:
            with pytest.raises(EngineDiedError, match="hung"):
                await long
    finally:
        await source.close()


async def test_a_thousand_requests_with_cancels_faults_and_one_kill() -> None:
    rng = random.Random(7)
    source = await opened({"poison": True})
    counts = {"whole": 0, "cancelled": 0, "error": 0, "died": 0, "refused": 0}
    gate = asyncio.Semaphore(60)
    killed = asyncio.Event()
    first = source.pid

    async def one(number: int) -> None:
        prompt = random_prompt(rng, 1, 30)
        prompt = [t if t != POISON else 3 for t in prompt]
        poison = rng.random() < 0.02
        if poison:
            prompt[rng.randrange(len(prompt))] = POISON
        request = Request(prompt, greedy(rng.randint(1, 16)), id=f"t{number}")
        leave = rng.randint(1, 5) if rng.random() < 0.15 else None
        async with gate:
            while True:
                tokens: list[int] = []
                stream = source.stream(request)
                try:
                    async for delta in stream:
                        tokens += delta.tokens
                        if delta.finish == "error":
                            # only a poisoned request, or one that generated the poison itself, may fail
                            assert poison or POISON in oracle(request, 0, len(prompt) + 99, 16)[0]
                            counts["error"] += 1
                        elif delta.finish is not None:
                            expected = oracle(request, 0, len(prompt) + request.sampling.max_tokens, 16)[0]
                            assert tokens == expected
                            counts["whole"] += 1
                        elif leave is not None and len(tokens) >= leave:
                            await stream.aclose()
                            counts["cancelled"] += 1
                            return
                    return
                except EngineDiedError:
                    assert killed.is_set()
                    counts["died"] += 1
                    return
                except CapacityError:
                    await asyncio.sleep(0.05)  # it is being restarted: told, tries again
                    counts["refused"] += 1

    async def kill() -> None:
        while counts["whole"] < 300:
            await asyncio.sleep(0.01)
        killed.set()
        assert source.pid is not None
        os.kill(source.pid, signal.SIGKILL)

    try:
        killer = asyncio.create_task(kill())
        await asyncio.wait_for(asyncio.gather(*(one(i) for i in range(1000))), 600)
        await killer
        assert sum(counts[k] for k in ("whole", "cancelled", "error", "died")) == 1000
        assert counts["died"] > 0
        assert counts["error"] > 0
        assert counts["cancelled"] > 20
        await whole(source, Request([9], greedy(1)))
        for _ in range(100):
            if source.stats().running == 0:
                break
            await whole(source, Request([9], greedy(1)))
        stats = source.stats()
        assert (stats.running, stats.waiting, stats.kv_pages_used) == (0, 0, 0), "something leaked"
        assert source.deaths == 1
        assert source.pid != first
    finally:
        await source.close()


def test_errors_keep_their_class_between_processes() -> None:
    from halfbyte.engine import messages

    for error in (UsageError("a."), EngineDiedError("b."), RequestError("c.")):
        assert type(messages.error_of(type(error).__name__, str(error))) is type(error)
    assert isinstance(messages.error_of("Strange", "x"), HalfbyteError)


def test_options_arrive_as_they_were_sent() -> None:
    import msgspec

    from halfbyte.engine import messages
    from halfbyte.engine.options import EngineOptions
    from halfbyte.gates import PRESETS

    options = EngineOptions("random:20b", PRESETS["fast"].gates, "cpu", max_context=512, kv_gib=0.5, draft="a folder")
    (body,) = messages.Frames().feed(messages.frame(messages.Start("module:function", options)))
    start = messages.decode_start(body)
    assert start.factory == "module:function"
    assert msgspec.convert(start.argument, EngineOptions) == options


def test_frames_survive_any_cut() -> None:
    from halfbyte.engine import messages

    delta = Delta([1, 2], 0, None, "stop")
    from halfbyte.engine.request import EngineStats

    data = messages.frame(messages.Stepped([("a", delta)], EngineStats())) * 3
    rng = random.Random(1)
    for _ in range(50):
        frames, got, at = messages.Frames(), [], 0
        while at < len(data):
            step = rng.randint(1, 40)
            got += frames.feed(data[at : at + step])
            at += step
        assert [messages.decode_from_engine(b).outputs for b in got] == [[("a", delta)]] * 3


async def test_a_real_model_in_its_process_gives_the_tokens_of_the_engine_here() -> None:
    from halfbyte.engine.options import EngineOptions
    from halfbyte.engine.python_api import Engine
    from halfbyte.gates import Gates

    gates = Gates(speculate="ngram")
    options = EngineOptions(
        model="random:small", gates=gates, device="cpu", max_context=256, kv_gib=0.02, reserve_gib=0.0
    )
    source = await EngineProcess.start(options)
    try:
        assert source.info.details["gates"]["speculate"] == "ngram"
        tokens, last = await whole(source, Request([5, 6, 7], greedy(6)))
    finally:
        await source.close()
    with Engine("random:small", max_context=256, kv_gib=0.02, reserve_gib=0.0) as here:
        assert here.generate([[5, 6, 7]], greedy(6))[0].tokens == tokens
    assert last.usage is not None
    assert last.usage.completion_tokens == len(tokens)
