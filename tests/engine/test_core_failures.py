"""The engine's core on the fake runner: steps that fail, and who pays for it."""

from __future__ import annotations

import pytest
from engine_fakes import VOCAB, oracle
from fake_core import GREEDY, drain, make, tokens_of

from halfbyte.engine.batch import Batch
from halfbyte.engine.engine import FAILURES_IN_A_ROW
from halfbyte.engine.request import Request
from halfbyte.errors import EngineDiedError


def breaks_on(token: int, error: type[Exception] = RuntimeError):
    """A fault that strikes whenever a batch holds this token."""

    def fault(batch: Batch) -> None:
        if token in batch.tokens.tolist():
            raise error("struck")

    return fault


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_request_that_breaks_its_step_ends_alone(run_ahead: bool) -> None:
    core = make(fault=breaks_on(50), run_ahead=run_ahead)
    good = [Request([5 + i, 6, 7], GREEDY, id=f"g{i}") for i in range(4)]
    poison = Request([5, 50, 9], GREEDY, id="bad")
    for r in [*good[:2], poison, *good[2:]]:
        core.submit(r)
    out = drain(core)
    assert out["bad", 0][-1].finish == "error"
    assert "RuntimeError: struck" in (out["bad", 0][-1].error or "")
    for r in good:
        expected = oracle(r, 0, 33, 8)[0]
        got = tokens_of(out[r.id, 0]) if out[r.id, 0][-1].finish != "error" else None
        if 50 in expected[:-1]:
            continue  # it generated the token that strikes
        assert got == expected


def test_a_step_without_memory_sheds_load_and_survives() -> None:
    limit = [100]

    def fault(batch: Batch) -> None:
        if batch.rows > limit[0]:
            raise MemoryError("no memory")

    core = make(pages=2000, max_rows_per_step=256, max_context=1000, fault=fault)
    requests = [Request([5 + i] * 300, GREEDY, id=f"m{i}") for i in range(4)]
    for r in requests:
        core.submit(r)
    out = drain(core)
    for r in requests:
        assert tokens_of(out[r.id, 0]) == oracle(r, 0, 330, 8)[0]
    assert core.scheduler.row_budget <= 128


def test_a_sequence_that_never_fits_in_memory_is_told() -> None:
    core = make(fault=breaks_on(50, MemoryError))
    core.submit(Request([50], GREEDY, id="a"))
    out = drain(core)
    assert out["a", 0][-1].finish == "error"
    assert "out of memory" in (out["a", 0][-1].error or "")


def test_a_runner_that_always_fails_is_given_up() -> None:
    def fault(batch: Batch) -> None:
        raise RuntimeError("gone")

    core = make(fault=fault)
    for i in range(FAILURES_IN_A_ROW + 4):
        core.submit(Request([5 + i], GREEDY, id=f"{i}"))
    with pytest.raises(EngineDiedError, match="steps in a row failed"):
        drain(core)


def test_logits_that_are_not_numbers_end_one_request() -> None:
    import engine_fakes
    import numpy as np

    core = make()
    real = engine_fakes.fake_logits

    def broken(prefix, window, vocab=VOCAB, tame=0.7):
        out = real(prefix, window, vocab, tame)
        return out * np.float32("nan") if prefix[0] == 40 and len(prefix) > 6 else out

    engine_fakes.fake_logits = broken
    try:
        core.submit(Request([40, 6, 7], GREEDY, id="nan"))
        core.submit(Request([41, 6, 7], GREEDY, id="ok"))
        out = drain(core)
    finally:
        engine_fakes.fake_logits = real
    assert out["nan", 0][-1].finish == "error"
    assert "not numbers" in (out["nan", 0][-1].error or "")
    assert len(tokens_of(out["ok", 0])) == 30


def test_a_dead_device_ends_the_engine_at_the_first_step() -> None:
    """No request is to blame, and sixteen more attempts would only keep the others waiting."""
    steps = []

    def fault(batch: Batch) -> None:
        steps.append(batch.rows)
        raise EngineDiedError("the GPU failed.")

    core = make(fault=fault)
    for i in range(3):
        core.submit(Request([5 + i], GREEDY, id=f"{i}"))
    with pytest.raises(EngineDiedError, match="the GPU failed"):
        drain(core)
    assert len(steps) <= 2, "the one that failed, and one launched on top of it"
    core.close()


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("tokens", VOCAB, "token"),
        ("tokens", -1, "token -1"),
        ("positions", 1 << 20, "position"),
        ("full_table", 1 << 20, "page"),
        ("sliding_table", -7, "page -7"),
        ("row_sequence", 3, "sequence"),
        ("kv_lens", 1 << 20, "length"),
    ],
)
def test_numbers_that_kernels_trust_are_looked_at_every_step(field: str, value: int, name: str) -> None:
    core = make()
    build = core.builder.build

    def wrong(*args: object) -> Batch:
        batch = build(*args)  # type: ignore[arg-type]
        array = getattr(batch, field).copy()
        array.flat[-1] = value
        setattr(batch, field, array)
        return batch

    core.builder.build = wrong  # type: ignore[method-assign, assignment]
    core.submit(Request([5, 6, 7], GREEDY, id="a"))
    out = drain(core)
    assert out["a", 0][-1].finish == "error"
    assert name in (out["a", 0][-1].error or "")
