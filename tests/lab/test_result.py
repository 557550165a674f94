"""The one schema: what it holds comes back as it was, and what does not fit is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import UsageError
from halfbyte.lab.result import Cell, Check, Figure, FigureCeiling, Result, ResultFile, figure, from_json, measure_cell

ROOF = FigureCeiling(1000.0, "H200")
CELL = Cell("decode", "120b", "fast", {"layers": "all"}, "engine", {"tg": 128, "depth": 2048, "concurrency": 8})


def example() -> ResultFile:
    result = Result(
        CELL,
        (
            figure("speed", "tok/s", [850.0, 845.0, 847.0], ROOF),
            figure("ttft", "ms", 50.0, FigureCeiling(25.0, "H200")),
        ),
        (Check("regimes on two layers", True, 0.003, 0.05),),
        (Check("at least 800 tok/s", True, 847.0, 800.0),),
        {"decode": {"kernels": {"decode_step": 128}}},
        {"experts_per_layer": 4.0},
    )
    other = Result(Cell("prompt", shape={"pp": 512}), checks=(Check("logits", False, 0.3, 0.05),))
    return ResultFile(
        "halfbyte bench", ("--tg", "128"), {"time": "2026-11-15T10:00:00"}, {"x.cu": "ab"}, (result, other)
    )


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = example()
    file.write(tmp_path / "deep" / "r.json")
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "r.json"]
    assert from_json(json.loads((tmp_path / "deep" / "r.json").read_text(encoding="utf-8"))) == file


def test_a_figure_is_a_median_with_its_spread() -> None:
    f = figure("speed", "tok/s", [850.0, 845.0, 847.0], ROOF)
    assert (f.value, f.low, f.high, f.samples) == (847.0, 845.0, 850.0, 3)
    assert f.share == pytest.approx(0.847)
    assert figure("ttft", "ms", 50.0, FigureCeiling(25.0, "H200")).share == pytest.approx(0.5)
    assert figure("kl", "nats", 0.0).share is None


@pytest.mark.parametrize(("unit", "value", "ceiling"), [("tok/s", 1001.0, 1000.0), ("us", 9.0, 10.0)])
def test_a_figure_above_its_ceiling_does_not_exist(unit: str, value: float, ceiling: float) -> None:
    with pytest.raises(UsageError, match="passes its ceiling"):
        figure("x", unit, value, FigureCeiling(ceiling, "H200"))
    cell = Cell("decode")
    refused = measure_cell(cell, lambda: Result(cell, (figure("x", unit, value, FigureCeiling(ceiling, "H200")),)))
    assert "passes its ceiling" in refused.refused
    assert refused.figures == ()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("x", "furlongs", 1.0, 1.0, 1.0), "unit"),
        (("x", "us", float("nan"), 1.0, 1.0), "x is not finite"),
        (("x", "us", 5.0, 1.0, 2.0), "spread"),
        (("x", "us", 1.0, 1.0, 1.0, 0), "0 times"),
    ],
)
def test_what_is_no_figure(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Figure(*arguments)
    with pytest.raises(UsageError, match="never measured"):
        figure("x", "us", [])


def test_a_failed_check_leaves_no_number() -> None:
    refused = example().results[1].refused
    assert "logits" in refused
    with pytest.raises(UsageError, match="all the same"):
        Result(CELL, (figure("speed", "tok/s", 1.0),), (Check("logits", False),))
    missed = Result(CELL, (figure("speed", "tok/s", 1.0),), targets=(Check("800 tok/s", False),))
    assert not missed.refused


def test_labels_are_those_of_llama_bench() -> None:
    assert CELL.label == "tg128 @ d2048, c=8"
    assert Cell("prompt", shape={"pp": 512, "depth": 0, "concurrency": 1}).label == "pp512"
    assert Cell("accuracy", shape={"task": "needle"}).label == "accuracy, task needle"


def test_asking_for_a_figure_that_is_not_there() -> None:
    assert example().results[0].figure("ttft").value == 50.0
    with pytest.raises(UsageError, match="it has: speed, ttft"):
        example().results[0].figure("watts")
    with pytest.raises(UsageError, match="logits"):
        example().results[1].figure("speed")


def _without(*path: Any) -> dict[str, Any]:
    raw = json.loads(json.dumps(example().as_json()))
    at = raw
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return dict(raw)


def _with(value: Any, *path: Any) -> dict[str, Any]:
    raw = json.loads(json.dumps(example().as_json()))
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return dict(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ([1], "expected object, got array"),
        (_without("schema"), "has no schema"),
        (_without("measured"), "missing required field measured"),
        (_without("results", 0, "cell", "kind"), r"results\[0\].cell: .*field kind"),
        (_with(2, "schema"), "schema: expected str, got int"),
        (_with("halfbyte.result/9", "schema"), "only 'halfbyte.result/1' is read"),
        (_with({}, "environment"), "no `time`"),
        (_with("fast", "results", 0, "figures", 0, "value"), r"results\[0\].figures\[0\].value: expected float"),
        (_with(True, "results", 0, "figures", 0, "samples"), r"figures\[0\].samples: expected int, got bool"),
        (_with(2000.0, "results", 0, "figures", 0, "value"), "outside of its own spread"),
        (_with(1, "results", 0, "speed"), r"does not know: results\[0\].speed"),
        (_with({}, "results"), "results: expected array"),
        (_with(3, "measured", "x.cu"), "measured.*: expected str, got int"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(raw: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        from_json(raw)


def test_what_ran_and_cannot_be_believed_is_invalid_and_what_could_not_run_is_refused() -> None:
    above = measure_cell(CELL, lambda: Result(CELL, (figure("speed", "tok/s", 2000.0, ROOF),)))
    assert (above.state, above.figures) == ("INVALID", ())
    assert example().results[1].state == "INVALID"
    assert measure_cell(CELL, lambda: 1 / 0).state == "refused"  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="say why"):
        Result(CELL, invalid=True)


def test_an_invalid_cell_keeps_what_it_showed_where_no_table_looks() -> None:
    good = Result(CELL, (figure("speed", "tok/s", [5.0, 6.0, 7.0]),), detail={"a": 1})
    bad = good.invalidated("the card was throttled").invalidated("and rambled")
    assert (good.state, bad.state, bad.figures) == ("measured", "INVALID", ())
    assert bad.refused == "the card was throttled; and rambled"
    assert bad.detail == {"a": 1, "not_believed": [{"name": "speed", "unit": "tok/s", "value": 6.0}]}
    file = ResultFile("t", (), {"time": "2026-11-15"}, {}, (bad,))
    assert from_json(json.loads(json.dumps(file.as_json()))) == file


def test_samples_are_kept_and_enough_of_them_have_an_interval() -> None:
    f = figure("speed", "tok/s", [3.0, 1.0, 2.0])
    assert f.values == (3.0, 1.0, 2.0)
    assert f.interval is None
    low, high = figure("speed", "tok/s", [9.0, 10.0, 11.0, 10.5, 9.5, 10.0]).interval or (0.0, 0.0)
    assert 9.0 <= low < 10.0 < high <= 11.0
    assert figure("gap", "ms", [1.0] * 1000).values == ()
