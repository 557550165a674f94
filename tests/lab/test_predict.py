"""Predictions from made-up receipts whose share and fixed cost are known, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.gates import PRESETS, parse
from halfbyte.lab import predict
from halfbyte.lab.receipts import Receipt
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


def receipt(name: str = "r1", state: str = "current", date: str = "2026-01-01", fixed: float = FIXED) -> Receipt:
    rows: list[dict[str, Any]] = []
    for context in (512, 2048):
        total = decode_traffic(C, predict.formats_of("mxfp4"), context).total
        us = total / (H200.read * SHARE) * 1e6 + 36 * fixed
        rows.append({"model": "120b", "formats": "mxfp4", "rows": 1, "context": context, "us": us})
    rows.append({"model": "120b", "formats": "mxfp4", "context": 2048, "phases": trace()})
    return Receipt(name, state, "", "NVIDIA H200", date, (), {"sources": name, "rows": rows})


def test_the_fit_finds_what_was_put_in() -> None:
    b = predict.basis([receipt()], "120b", "mxfp4", 2048)
    assert b.streaming == pytest.approx(SHARE)
    assert b.streaming_short == pytest.approx(SHORT)
    assert b.fixed_us == pytest.approx(FIXED)
    assert b.router_us == pytest.approx(ROUTER)
    assert b.context == 2048


def test_where_it_was_measured_the_central_value_is_the_measurement() -> None:
    p = predict.predict("h200", "120b", FAST, 2048, [receipt()])
    row = receipt().raw["rows"][1]
    assert p.central == pytest.approx(1e6 / row["us"])
    low, central, high = (s.tokens_per_second for s in p.scenarios)
    assert low == pytest.approx(central)
    assert central < high < p.ceiling


def test_gb10_by_hand() -> None:
    p = predict.predict("DGX Spark", "120b", FAST, 2048, [receipt()])
    total = decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    seconds = total / (232e9 * SHARE) + 36 * FIXED * 1e-6 * 1.98 / 2.14
    assert p.central == pytest.approx(1 / seconds)
    low, central, high = (s.tokens_per_second for s in p.scenarios)
    assert low < central < high < p.ceiling
    assert p.scenarios[2].fixed_us == pytest.approx(ROUTER * 1.98 / 2.14)
    assert any("sm121" in w for w in p.warnings) == ("cuda.decode_step" not in _chosen())


def rehearsed(fixed: float, stream: float, **other: Any) -> dict[str, Any]:
    """A traced row whose stream and fixed cost are these."""
    traffic = decode_traffic(C, predict.formats_of("mxfp4"), 2048)
    head = step_work(C, predict.formats_of("mxfp4"), 1, 2048)["lm_head"].bytes / stream * 1e6
    us = (traffic.total - traffic.rest) / stream * 1e6 + 36 * fixed
    row = {
        "gpu": "gb10", "model": "120b", "formats": "mxfp4", "context": 2048, "share": 0.9, "slots": 6,
        "read": GPUS["gb10"].read, "blocks": GPUS["gb10"].blocks,
        "phases": {"us": us, "clock_ghz": 1.7, "head": {"start": 1.0, "sums": 1.0 + head}},
    }  # fmt: skip
    return row | other


def test_a_rehearsal_gives_the_fixed_cost() -> None:
    def told(*rows: dict[str, Any], state: str = "current", name: str = "r9") -> Receipt:
        return Receipt(name, state, "", "NVIDIA H200", "2026-01-02", (), {"rehearsed": list(rows)})

    row = rehearsed(9.0, 200e9)
    p = predict.predict("gb10", "120b", FAST, 2048, [receipt(), told(row)])
    plain = predict.predict("gb10", "120b", FAST, 2048, [receipt()])
    assert p.formula == plain.scenarios
    assert p.scenarios[0] == plain.scenarios[0]
    assert p.rehearsal is not None
    assert p.rehearsal.fixed_us == pytest.approx(9.0)
    assert p.rehearsal.stream == pytest.approx(200e9)
    total = decode_traffic(C, predict.formats_of("mxfp4"), 2048).total
    for scenario, share in zip(p.scenarios[1:], (SHARE, 1.0)):
        assert scenario.tokens_per_second == pytest.approx(1 / (total / (232e9 * share) + 36 * 9e-6))
    stale = predict.predict("gb10", "120b", FAST, 2048, [receipt(), told(row, state="STALE")])
    assert any("r9 is STALE" in w for w in stale.warnings)
    others = [
        told(rehearsed(9.0, 200e9, **change))
        for change in (
            {"read": 1e12},
            {"context": 512},
            {"gpu": "rtx5090"},
            {"formats": "q8"},
            {"model": "120b, 4 layers"},
        )
    ]
    wrong = told(row, rehearsed(9.0, 200e9, phases=None, ok=False))  # its kernel failed the check
    assert predict.predict("gb10", "120b", FAST, 2048, [receipt(), *others, wrong]).rehearsal is None
    assert predict.predict("h200", "120b", FAST, 2048, [receipt(), told(row)]).rehearsal is None


def _chosen() -> tuple[str, ...]:
    from halfbyte.model.gpt_oss import choose
    from halfbyte.plan.phase import ARCHES

    return choose(C, FAST, ARCHES["sm121"])[2].chosen["decode"]


def test_the_model_is_held_against_other_measurements() -> None:
    """A row of 20b that was made with another fixed cost shows as the error it is."""
    r = receipt()
    c = NAMED["20b"]
    total = decode_traffic(c, predict.formats_of("mxfp4"), 2048).total
    truth = total / (H200.read * SHARE) * 1e6 + c.layers * FIXED
    r.raw["rows"].append({"model": "20b", "formats": "mxfp4", "rows": 1, "context": 2048, "us": truth / 1.1})
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


def test_other_models_and_sizes_are_said() -> None:
    p = predict.predict("rtx5090", "20b", FAST, 2048, [receipt()])
    assert any("measured on 120b" in w for w in p.warnings)
    assert any("does not fit" in w for w in predict.predict("rtx5090", "120b", FAST, 2048, [receipt()]).warnings)


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


def test_names() -> None:
    assert gpu_named("NVIDIA GB10").name == gpu_named("spark").name == GPUS["gb10"].name
    assert gpu_named("RTX PRO 6000") is GPUS["pro6000"]


def test_the_command_prints_every_input() -> None:
    done = CliRunner().invoke(app, ["profile", "--predict", "gb10,h200", "--preset", "fast"])
    assert done.exit_code == 0, done.output
    for word in ("PREDICTED", "GB10", "streaming share", "fixed", "assumed", "232 GB/s"):
        assert word in done.stdout
    made = CliRunner().invoke(app, ["profile", "--predict", "gb10", "--preset", "fast", "--json"])
    (p,) = json.loads(made.stdout)["predictions"]
    assert p["label"] == "PREDICTED"
    assert p["basis"]["receipt"] in {r["name"] for r in _listed()}


def _listed() -> list[dict[str, Any]]:
    return list(json.loads(CliRunner().invoke(app, ["bench", "--receipts", "--json"]).stdout)["receipts"])
