"""The engine's figures: calibrated against a runner of known speed, and sane on the embedded model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.engine.batch import Batch
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.runner import StepResult
from halfbyte.errors import InvalidFigureError, UsageError
from halfbyte.lab.measure import engine_timing
from halfbyte.lab.measure.engine_timing import (
    ATTEMPTS,
    CoreClient,
    TimedWork,
    all_work,
    measure_engine,
    time_work,
)
from halfbyte.lab.measure.event_stream import StreamReading
from halfbyte.lab.measure.rounds import CellRuns, Measured
from halfbyte.lab.result import Cell, Check
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

TINY = Cell("", "tiny", path="engine")


@pytest.fixture(scope="module")
def model() -> GptOss:
    return load.load_model(load.resolve_model(None))


class Machine:
    """A device on a clock of its own: a step takes `step` seconds and `row` more for every row it computes."""

    def __init__(self, step: float, row: float) -> None:
        self.step, self.row, self.now, self.busy_until = step, row, 0.0, 0.0

    def clock(self) -> float:
        return self.now

    def launch(self, batch: Batch) -> Pending:
        self.busy_until = max(self.now, self.busy_until) + self.step + self.row * batch.rows
        return Pending(self, self.busy_until, len(batch.samplers))

    def close(self) -> None: ...


class Pending:
    def __init__(self, machine: Machine, done: float, rows: int) -> None:
        self.machine, self.done, self.rows = machine, done, rows

    def result(self) -> StepResult:
        self.machine.now = max(self.machine.now, self.done)
        return StepResult([7] * self.rows)


def client_of(machine: Machine, rows: int = 8192) -> CoreClient:
    config = EngineConfig(pages=50_000, max_seqs=64, vocab=1000, max_rows_per_step=rows)
    return CoreClient(EngineCore(machine, config), machine.clock)


@pytest.mark.parametrize("concurrency", [1, 8, 64])
@pytest.mark.parametrize("depth", [0, 256])
def test_decode_of_a_machine_of_known_speed(concurrency: int, depth: int) -> None:
    """Steps of exactly 10 ms, however many rows: every request gets 100 tokens a second."""
    work = TimedWork(tokens=64, depth=depth, concurrency=concurrency)
    timing = time_work(client_of(Machine(0.010, 0.0)), work, 1000, repeats=3)
    assert timing.rates == pytest.approx([100.0 * concurrency] * 3)
    assert len(timing.sequences) == concurrency
    assert {len(s) for s in timing.sequences} == {max(depth, 1) + 64}


@pytest.mark.parametrize(("prompt", "concurrency"), [(512, 1), (2048, 1), (512, 4)])
def test_prompts_of_a_machine_of_known_speed(prompt: int, concurrency: int) -> None:
    """10 us a row and nothing else: 100,000 tokens a second, all of them in one step."""
    timing = time_work(
        client_of(Machine(0.0, 1e-5)), TimedWork(prompt=prompt, concurrency=concurrency), 1000, repeats=2
    )
    assert timing.rates == pytest.approx([1e5] * 2)
    assert timing.first == pytest.approx([prompt * concurrency * 1e-5] * 2 * concurrency)


def test_a_prefix_in_the_cache_is_not_counted() -> None:
    timing = time_work(client_of(Machine(0.0, 1e-5)), TimedWork(prompt=512, depth=1024), 1000, repeats=2)
    assert timing.cached == [1024, 1024]
    assert timing.rates == pytest.approx([1e5] * 2)
    assert timing.first == pytest.approx([512e-5] * 2)


def test_only_the_time_in_which_all_decode_counts() -> None:
    """The first of two prompts begins to decode while the second is still read: that is no decode speed of both."""
    machine = Machine(0.010, 1e-4)
    timing = time_work(client_of(machine, rows=600), TimedWork(tokens=64, depth=0, concurrency=2), 1000, repeats=1)
    assert timing.rates == pytest.approx([2 / 0.0102])

    class Late:
        def complete(self, prompts: list[list[int]], tokens: int) -> list[StreamReading]:
            first = StreamReading([(float(i), 1) for i in range(tokens)], [7] * tokens)
            second = StreamReading([(20.0 + i, 1) for i in range(tokens)], [7] * tokens)
            return [first, second]

    timing = time_work(Late(), TimedWork(tokens=30, concurrency=2), 1000, repeats=1)  # type: ignore[arg-type]
    assert timing.rates == [2.0]
    with pytest.raises(InvalidFigureError, match="before another had its first"):
        time_work(Late(), TimedWork(tokens=10, concurrency=2), 1000, repeats=1)  # type: ignore[arg-type]


def test_a_client_that_slept_is_asked_again_and_not_for_ever() -> None:
    class Sleepy:
        """Reads all tokens at once the first `times`, then as they come: one a second."""

        def __init__(self, times: int) -> None:
            self.times = times

        def complete(self, prompts: list[list[int]], tokens: int) -> list[StreamReading]:
            self.times -= 1
            pace = 0.0 if self.times >= 0 else 1.0
            return [StreamReading([(pace * i, 1) for i in range(tokens)], [7] * tokens) for _ in prompts]

    assert time_work(Sleepy(ATTEMPTS - 1), TimedWork(tokens=8), 1000, repeats=1).rates == [1.0]  # type: ignore[arg-type]
    with pytest.raises(InvalidFigureError, match="the tokens came at once"):
        time_work(Sleepy(ATTEMPTS), TimedWork(tokens=8), 1000, repeats=1)  # type: ignore[arg-type]


def test_a_request_that_ends_early_is_no_figure() -> None:
    class Short:
        def complete(self, prompts: list[list[int]], tokens: int) -> list[StreamReading]:
            return [StreamReading([(1.0, 1)], [7]) for _ in prompts]

    with pytest.raises(InvalidFigureError, match="1 tokens instead of 8"):
        time_work(Short(), TimedWork(tokens=8), 1000, repeats=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fast_machine")
def test_the_embedded_model_beside_its_ceilings(model: GptOss) -> None:
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    works = [
        TimedWork(prompt=32),
        TimedWork(tokens=6),
        TimedWork(prompt=32, depth=128, concurrency=2),
        TimedWork(tokens=6, concurrency=3),
    ]
    results = measure_engine(model, tokenizer, works, 2, cell=TINY, checks=(Check("compared", True),))
    assert [r.cell.label for r in results] == ["pp32", "tg6", "pp32 @ d128, c=2", "tg6, c=3"]
    for r in results:
        speed = r.figure("speed")
        assert speed.samples == 2
        assert speed.share is not None
        assert 0 < speed.share < 1
        assert r.checks[0] == Check("compared", True)
        assert r.record is not None
        if "pp" in r.cell.shape:
            assert r.figure("ttft").samples == 2 * r.cell.shape["concurrency"]
        else:
            k = model.config.top_k
            assert k <= r.detail["experts_per_layer"] <= k * r.cell.shape["concurrency"]


def test_the_order_is_llama_benchs() -> None:
    labels = [Cell("", shape=w.shape).label for w in all_work([32], [6], [0, 128], [1, 3])]
    first = ["pp32", "tg6", "pp32, c=3", "tg6, c=3"]
    assert labels == [*first, "pp32 @ d128", "tg6 @ d128", "pp32 @ d128, c=3", "tg6 @ d128, c=3"]


def test_experts_are_those_of_the_timed_steps(model: GptOss) -> None:
    """The same sequence twice touches what one touches; sequences of their own touch more, as the router says."""
    one, other = engine_timing.random_prompts(model.config.vocab, 2, 40, 1)
    k = float(model.config.top_k)
    assert engine_timing.count_experts(model, [one], 8) == k
    assert engine_timing.count_experts(model, [one, one], 8) == k
    both = engine_timing.count_experts(model, [one, other], 8)
    assert both is not None
    assert k < both <= 2 * k
    first, second = (engine_timing._choices(model, torch.tensor(s[:-1], dtype=torch.int32), 7) for s in (one, other))
    assert first is not None
    assert second is not None
    counts = [
        len(set(a.tolist()) | set(b.tolist())) for a, b in zip(first.flatten(0, 1), second.flatten(0, 1), strict=True)
    ]
    assert both == pytest.approx(sum(counts) / len(counts))


@pytest.mark.usefixtures("fast_machine")
def test_what_is_refused(model: GptOss) -> None:
    tokenizer = load.tokenizer_of(load.resolve_model(None))
    (refused,) = measure_engine(model, tokenizer, [TimedWork(tokens=4)], 1, cell=TINY, checks=(Check("logits", False),))
    assert "logits" in refused.refused
    with pytest.raises(UsageError, match="more than this model's context"):
        measure_engine(model, tokenizer, [TimedWork(prompt=10**6)], 1, cell=TINY)
    options = EngineOptions(gates=model.gates, max_seqs=1, max_context=256, kv_gib=0.01)
    too_long, fits = measure_engine(
        model, tokenizer, [TimedWork(prompt=2000), TimedWork(prompt=16)], 1, cell=TINY, options=options
    )
    assert "2000" in too_long.refused or "context" in too_long.refused
    assert fits.figure("speed").value > 0


def test_a_speed_above_the_ceiling_is_refused(model: GptOss) -> None:
    work, runs = TimedWork(tokens=4), CellRuns([Measured(1e12, 1.0, (0.1,), (0,), [[1, 2, 3]])] * 2)
    with pytest.raises(UsageError, match="passes its ceiling"):
        engine_timing.result_of(work, runs, replace(TINY, kind="decode"), model, 4.0)
    assert engine_timing.result_of(work, runs, TINY, None).figure("speed").ceiling is None
