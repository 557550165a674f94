"""Predictions from made-up receipts whose share and fixed cost are known, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.gates import PRESETS, parse
from halfbyte.lab import predict, receipts
from halfbyte.lab.receipts import Receipt
from halfbyte.lab.result import Cell, Check, Result, ResultFile, figure
from halfbyte.model.config import NAMED
from halfbyte.roofline import GPUS, decode_traffic, gpu_named, step_work

FAST = PRESETS["fast"].gates
SHARE, SHORT, FIXED, ROUTER = 0.9, 0.8, 12.0, 3.0
H200, C = GPUS["h200"], NAMED["120b"]


def trace() -> dict[str, Any]:
    """Marks that give exactly those shares."""
    work = step_work(C, predict.formats_of("mxfp4"), 1, 2048)
    head = work["lm_head"].bytes / (H200.read * SHARE) * 1e6
    moe = work["moe"].bytes / 36 / (H200.read * SHORT) * 1e6
    marks = {
        f"{p} {m}": [0.0, 0.0, 0.0] for p in ("qkv", "attention", "o", "gate_up", "down") for m in ("sums", "done")
    }
    marks |= {"gate_up x": [ROUTER] * 3, "gate_up sums": [ROUTER + moe / 2] * 3, "down x": [20.0] * 3}
    marks |= {"down sums": [20.0 + moe / 2] * 3, "attention sums": [0.0] * 3}
    layer: dict[str, Any] = {**marks, "layer": 30.0}
    return {
        "us": 1500.0, "clock_ghz": 1.9, "layers": {"sliding": layer, "full": layer},
        "head": {"start": 1.0, "x": 3.0, "sums": 1.0 + head, "done": 0.0},
    }  # fmt: skip


def step(model: str, context: int, us: float | None, trace: dict[str, Any] | None = None) -> Result:
    cell = Cell("decode", model, path=predict.KERNEL, shape={"formats": "mxfp4", "rows": 1, "context": context})
    return Result(
        cell, () if us is None else (figure("step", "us", us),), detail={} if trace is None else {"trace": trace}
    )


def file_of(results: list[Result], date: str, source: str) -> ResultFile:
    return ResultFile("x", (), {"time": date, "gpus": [{"name": "NVIDIA H200"}]}, {"x.cu": source}, tuple(results))


def receipt(
    name: str = "r1",
    state: str = "current",
    date: str = "2026-01-01",
    fixed: float = FIXED,
    more: tuple[Result, ...] = (),
    head: float = 1.0,
) -> Receipt:
    results = []
    for context in (512, 2048):
        total = decode_traffic(C, predict.formats_of("mxfp4"), context).total
        results.append(step("120b", context, total / (H200.read * SHARE) * 1e6 + 36 * fixed))
    marks = trace()
    marks["head"]["sums"] *= head
    results.append(step("120b", 2048, None, marks))
    return Receipt(name, state, "", file_of([*results, *more], date, name))


def test_the_fit_finds_what_was_put_in() -> None:
    b = predict.basis([receipt()], "120b", "mxfp4", 2048)
    assert b.streaming == pytest.approx(SHARE)
    assert b.streaming_short == pytest.approx(SHORT)
    assert b.fixed_us == pytest.approx(FIXED)
    assert b.router_us == pytest.approx(ROUTER)
    assert b.context == 2048


def test_where_it_was_measured_every_value_is_the_measurement() -> None:
    p = predict.predict("h200", "120b", FAST, 2048, [receipt()])
    us = receipt().results[1].figure("step").value
    assert [s.tokens_per_second for s in p.scenarios] == pytest.approx([1e6 / us] * 3)
    assert p.measured
    assert p.as_dict()["label"] == "MEASURED"
    other = predict.predict("h200", "20b", FAST, 2048, [receipt()])  # carried over to another shape
    assert not other.measured
    assert other.as_dict()["label"] == "PREDICTED"


def test_gb10_by_hand() -> None:
    p = predict.predict("DGX Spark", "120b", FAST, 2048, [receipt()])
    total = decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    seconds = total / (232e9 * SHARE) + 36 * FIXED * 1e-6 * 1.98 / 2.14
    assert p.central == pytest.approx(1 / seconds)
    low, central, high = (s.tokens_per_second for s in p.scenarios)
    assert low < central < high < p.ceiling
    assert p.scenarios[2].fixed_us == pytest.approx(ROUTER * 1.98 / 2.14)
    assert not p.void
    assert "cuda.decode_step" in _chosen()


def rehearsed(fixed: dict[float, float], model: str = "120b", **other: Any) -> list[Result]:
    """A GB10 at these shares of its bandwidth, with so much per layer beside their bytes."""
    total = decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    shape = {
        "gpu": "gb10", "formats": "mxfp4", "context": 2048, "slots": 6, "variant": "", "read": 232e9, "blocks": 48,
        "blocks_of": 48,
    }  # fmt: skip
    return [
        Result(
            Cell("rehearsal", model, path=predict.KERNEL, shape=shape | {"share": share} | other),
            (figure("step", "us", total / (232e9 * share) * 1e6 + 36 * us),),
        )
        for share, us in fixed.items()
    ]


def like(result: Result, us: float | None = None, checks: tuple[Check, ...] = (), **shape: Any) -> Result:
    cell = replace(result.cell, shape={**result.cell.shape, **shape})
    return Result(cell, () if us is None else (figure("step", "us", us),), checks)


def told(*results: Result, state: str = "current", name: str = "r9") -> Receipt:
    return Receipt(name, state, "", file_of(list(results), "2026-01-02", name))


def test_a_rehearsal_gives_the_fixed_cost_at_each_pace() -> None:
    rows = rehearsed({1.0: 8.0, 0.8: 6.0})
    unpaced = like(rows[0], 2000.0, share=0.0)  # says nothing about a pace
    variant = like(rows[0], 99999.0, variant="workers=4")
    p = predict.predict("gb10", "120b", FAST, 2048, [receipt(), told(unpaced, variant, *rows)])
    plain = predict.predict("gb10", "120b", FAST, 2048, [receipt()])
    assert p.formula == plain.scenarios
    assert p.rehearsal is not None
    assert [round(f, 6) for _, _, f in p.rehearsal.times] == [8.0, 6.0]
    total = decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    middle = 2 / (1 / 201e9 + 1 / 214e9)  # what products get there
    for s, read in zip(p.scenarios, (1 / (2 / middle - 1 / 232e9), middle, 232e9)):
        fixed = 8.0 - 2.0 * (232e9 / read - 1) / (1 / 0.8 - 1)
        assert s.fixed_us == pytest.approx(fixed)
        assert s.tokens_per_second == pytest.approx(1 / (total / read + 36e-6 * fixed))
    assert p.rehearsal.fixed(100e9) == pytest.approx(6.0)  # beyond what was rehearsed: as at the nearest
    assert p.rehearsal.fixed(900e9) == pytest.approx(8.0)


def test_instructions_of_the_measured_gpu_do_not_slow_a_rehearsed_one_down() -> None:
    """lm_head of the basis at half its speed: the formula's figures fall, the rehearsed ones do not."""
    slow = receipt(head=2.0)
    rows = told(*rehearsed({1.0: 8.0, 0.6: 8.0}))
    one, two = (predict.predict("gb10", "120b", FAST, 2048, [r, rows]) for r in (receipt(), slow))
    assert one.scenarios == two.scenarios
    assert two.formula[2].tokens_per_second < 0.7 * one.formula[2].tokens_per_second


def test_which_rehearsals_count() -> None:
    good = rehearsed({1.0: 8.0, 0.8: 6.0})
    stale = predict.predict("gb10", "120b", FAST, 2048, [receipt(), told(*good, state="STALE")])
    assert any("r9 is STALE" in w for w in stale.warnings)
    changes: tuple[dict[str, Any], ...] = (
        {"read": 1e12}, {"context": 512}, {"gpu": "rtx5090"}, {"formats": "q8"}, {"model": "120b, 4 layers"},
        {"blocks_of": 170}, {"variant": "slot=8192"}, {"share": 1.0},
    )  # fmt: skip
    for change in changes:
        other = told(*rehearsed({1.0: 8.0, 0.8: 6.0}, **change))
        assert predict.predict("gb10", "120b", FAST, 2048, [receipt(), other]).rehearsal is None, change
    wrong = told(*good, like(good[0], checks=(Check("against the twin", False),)))
    assert predict.predict("gb10", "120b", FAST, 2048, [receipt(), wrong]).rehearsal is None
    assert predict.predict("h200", "120b", FAST, 2048, [receipt(), told(*good)]).rehearsal is None


def test_a_slice_of_a_gpu_has_its_part_of_the_memory() -> None:
    """132 of 188 blocks with 132/188 of the bandwidth take as long as the bytes there say; the rest is fixed."""
    gpu, total = GPUS["pro6000"], decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    rows = [
        like(
            row, total / (gpu.read * row.cell.shape["share"] * 132 / 188) * 1e6 + 36 * 10.0, gpu="pro6000",
            read=gpu.read, blocks_of=188, blocks=132,
        )
        for row in rehearsed({1.0: 0.0, 0.8: 0.0})
    ]  # fmt: skip
    p = predict.predict("pro6000", "120b", FAST, 2048, [receipt(), told(*rows)])
    assert [s.fixed_us for s in p.scenarios] == pytest.approx([10.0] * 3)
    assert p.scenarios[2].tokens_per_second == pytest.approx(1 / (total / (gpu.read * 4.5 / 4.8) + 360e-6))


def _chosen() -> tuple[str, ...]:
    from halfbyte.model.gpt_oss import choose
    from halfbyte.plan.phase import ARCHES

    return choose(C, FAST, ARCHES["sm121"]).selection.chosen["decode"]


def test_the_model_is_held_against_other_measurements() -> None:
    """A row of 20b that was made with another fixed cost shows as the error it is."""
    c = NAMED["20b"]
    total = decode_traffic(c, predict.formats_of("mxfp4"), 2048).total
    truth = total / (H200.read * SHARE) * 1e6 + c.layers * FIXED
    r = receipt(more=(step("20b", 2048, truth / 1.1),))
    (check,) = predict.predict("gb10", "120b", FAST, 2048, [r]).checks
    assert check.what == "20b mxfp4"
    assert check.error == pytest.approx(0.1)


def test_a_chip_that_issues_less_per_byte_is_slowed_down() -> None:
    p = predict.predict("b200", "120b", FAST, 2048, [receipt()])
    assert p.scenarios[1].streaming < SHARE
    assert p.scenarios[1].read == pytest.approx(8e12 * 4.5 / 4.8)
    assert predict.predict("rtx 5090", "20b", FAST, 2048, [receipt()]).scenarios[1].streaming == pytest.approx(SHARE)


def test_current_before_stale_then_newest() -> None:
    old, new = receipt("r1", date="2026-01-01"), receipt("r2", date="2026-02-01", fixed=8.0)
    assert predict.basis([old, new], "120b", "mxfp4", 2048).receipt == "r2"
    stale = receipt("r3", "STALE", "2026-03-01")
    assert predict.basis([new, stale], "120b", "mxfp4", 2048).receipt == "r2"
    p = predict.predict("h100", "120b", FAST, 2048, [stale])
    assert any("STALE" in w for w in p.warnings)


def test_other_models_are_said_and_what_means_nothing_has_no_figure() -> None:
    p = predict.predict("rtx5090", "20b", FAST, 2048, [receipt()])
    assert any("measured on 120b" in w for w in p.warnings)
    assert not p.void
    large = predict.predict("rtx5090", "120b", FAST, 2048, [receipt()])
    assert "does not fit in 32 GB; --model 20b does" in large.void
    assert large.as_dict()["tokens_per_second"] is None
    triton = predict.predict("b200", "120b", FAST, 2048, [receipt()])
    assert "sm100 decodes with triton kernels" in triton.void
    assert "is written for sm8x, sm90 and sm12x, not for sm100" in triton.void


def test_slower_memory_hides_waits_as_far_as_it_is_slower() -> None:
    high = {g: predict.predict(g, "120b", FAST, 2048, [receipt()]).scenarios[2].fixed_us for g in ("h100", "pro6000")}
    assert high["h100"] == pytest.approx(FIXED * 3.35 / 4.5)
    assert high["pro6000"] == pytest.approx(FIXED * 1.792 / 4.5 * 1.98 / 2.62)


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU 'gtx 9000'"):
        predict.predict("gtx 9000", "120b", FAST, 2048, [receipt()])
    with pytest.raises(UsageError, match="no shape"):
        predict.predict("gb10", "7b", FAST, 2048, [receipt()])
    with pytest.raises(UsageError, match="no receipt"):
        predict.predict("gb10", "120b", PRESETS["balanced"].gates, 2048, [receipt()])
    mixed = parse({"layers": "qkv=q8,o=mxfp4,lm_head=q8"})
    with pytest.raises(UsageError, match="one format"):
        predict.predict("gb10", "120b", mixed, 2048, [receipt()])


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("gb10", ["NVIDIA GB10", "spark", "DGX Spark", "GB10 (DGX Spark)"]),
        ("pro6000", ["RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "pro 6000"]),
        ("rtx5090", ["NVIDIA GeForce RTX 5090", "5090"]),
        ("h100", ["NVIDIA H100 80GB HBM3", "H100 SXM"]),
        ("h200", ["NVIDIA H200"]),
        ("b200", ["NVIDIA B200"]),
        ("rtx3090", ["NVIDIA GeForce RTX 3090", "3090"]),
        ("rtx4090", ["NVIDIA GeForce RTX 4090", "RTX 4090"]),
        ("a100", ["NVIDIA A100-SXM4-80GB", "A100"]),
        ("a6000", ["NVIDIA RTX A6000", "a6000"]),
        ("l40s", ["NVIDIA L40S"]),
        ("rtx6000ada", ["NVIDIA RTX 6000 Ada Generation"]),
    ],
)
def test_names(key: str, names: list[str]) -> None:
    for name in (key, *names, GPUS[key].name):
        assert gpu_named(name) is GPUS[key], name


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"])
def test_another_memory_is_another_gpu(name: str) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        gpu_named(name)


def test_the_command_prints_every_input() -> None:
    done = CliRunner().invoke(app, ["profile", "--predict", "gb10,h200,b200,rtx5090,pro6000,h100", "--preset", "fast"])
    assert done.exit_code == 0, done.output
    assert "measured" in done.stdout
    assert "sm100 decodes with triton" in done.stdout
    assert "--model 20b does" in done.stdout
    for word in ("PREDICTED", "GB10", "streaming share", "fixed", "assumed", "232 GB/s"):
        assert word in done.stdout
    made = CliRunner().invoke(app, ["profile", "--predict", "gb10", "--preset", "fast", "--json"])
    (p,) = json.loads(made.stdout)["predictions"]
    assert p["label"] == "PREDICTED"
    assert p["basis"]["receipt"] in {r["name"] for r in _listed()}


def _listed() -> list[dict[str, Any]]:
    return list(json.loads(CliRunner().invoke(app, ["receipts", "--json"]).stdout)["receipts"])


PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("preset", ["exact", "balanced", "fast"])
@pytest.mark.parametrize(("shape", "column"), [("120b", 1), ("20b", 2)])
def test_the_page_of_a_spark_says_what_is_predicted(preset: str, shape: str, column: int) -> None:
    p = predict.predict("gb10", shape, PRESETS[preset].gates, 2048, receipts.read_all())
    text = (PAGES / "install.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{preset}`: ")]
    low, central, high = (s.tokens_per_second for s in p.scenarios)
    assert row.strip("| ").split(" | ")[column].strip() == f"{central:.0f} ({low:.0f} to {high:.0f})"


OLDER = [("rtx3090", "20b"), ("rtx4090", "20b"), ("a6000", "20b"), ("l40s", "20b"), ("a100", "20b"), ("a100", "120b")]


@pytest.mark.parametrize(("gpu", "shape"), OLDER)
def test_the_page_of_older_cards_says_what_is_predicted(gpu: str, shape: str) -> None:
    """Labelled as predictions, with a warning that nobody has measured a step without a copy engine."""
    cells = []
    for preset in ("exact", "balanced", "fast"):
        p = predict.predict(gpu, shape, PRESETS[preset].gates, 2048, receipts.read_all())
        assert (p.void, p.measured, p.as_dict()["label"]) == ("", False, "PREDICTED")
        assert any("no copy engine" in w for w in p.warnings)
        low, central, high = (s.tokens_per_second for s in p.scenarios)
        assert low < central < high < p.ceiling
        cells.append(f"{central:.0f} ({low:.0f} to {high:.0f})")
    text = (PAGES / "install.md").read_text(encoding="utf-8")
    assert f"| {p.gpu.name}, {shape} | {' | '.join(cells)} |" in text.splitlines()


def test_a_copy_engine_needs_no_such_warning() -> None:
    assert not any("copy engine" in w for w in predict.predict("gb10", "20b", FAST, 2048, [receipt()]).warnings)


@pytest.mark.parametrize(("gpu", "shape"), [("gb10", "120b"), ("pro6000", "120b"), ("rtx5090", "20b")])
def test_the_page_of_results_says_what_is_predicted(gpu: str, shape: str) -> None:
    p = predict.predict(gpu, shape, FAST, 2048, receipts.read_all())
    text = (PAGES / "results.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {p.gpu.name}, {shape} |")]
    low, central, high = (s.tokens_per_second for s in p.scenarios)
    figure = f"{central:.0f}" if central >= 100 else f"{central:.1f}"
    assert row == f"| {p.gpu.name}, {shape} | **{figure}** | {low:.0f} to {high:.0f} | {p.ceiling:.0f} |"
