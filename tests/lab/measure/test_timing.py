"""The parts of the GPU measurements that need no GPU: steps, counted experts, the engine under load, work and rates."""

from __future__ import annotations

import sys
import time
from functools import partial
from types import ModuleType

import pytest
import torch

from halfbyte.gpu_sensor import Sample
from halfbyte.lab.measure import device_timing, phase_timing
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import Cell, FigureCeiling, measure_cell
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan.activations import Activations
from halfbyte.roofline import GPUS, Work
from tests.reference import EXACT_FORM, REFERENCE


@pytest.fixture(scope="module")
def model() -> GptOss:
    return load.load_model(load.resolve_model(None))


def test_experts_are_counted_from_the_routers_choices() -> None:
    model = load.load_model(load.resolve_model(None), REFERENCE)
    cache = device_timing.fill(model, 3, 128)
    step = device_timing.decode_step(model, cache, 100, 5)
    found = device_timing.experts_touched(model, step)
    assert found is not None
    counted, where = found
    assert where == "router of decode"
    acts = Activations()
    each = []
    for b in model.plan.bound["decode"]:
        b.launch(step, acts)
        if "router" in b.phase.covers:
            each.append(len(set(acts.topk_ids.flatten().tolist())))
    assert counted == pytest.approx(sum(each) / len(each))
    assert model.config.top_k <= counted <= 3 * model.config.top_k


def test_a_whole_step_tells_its_choices() -> None:
    """In its exact form they are the reference's; a tie that falls the other way would move the mean by a tenth."""
    counts = []
    for gates in (EXACT_FORM, REFERENCE):
        model = load.load_model(load.resolve_model(None), gates)
        step = device_timing.decode_step(model, device_timing.fill(model, 3, 128), 100, 5)
        counts.append(device_timing.experts_touched(model, step))
    assert counts[0] == (pytest.approx(counts[1][0], abs=0.15), counts[1][1])


@pytest.mark.exact
def test_prefill_steps_are_the_prompt(model: GptOss) -> None:
    """Chunks over a filled cache give the logits of the prompt fed in one go."""
    cache = device_timing.fill(model, 1, 128)
    ids = device_timing.random_tokens(model, 70, 1)
    for at in range(0, 70, 32):
        logits = model.forward(device_timing.prefill_step(model, cache, ids[at : at + 32], at))
    assert torch.equal(logits, SingleSequence(model, 128).feed(ids.tolist()))


def test_every_stream_has_pages_of_its_own(model: GptOss) -> None:
    cache = device_timing.fill(model, 4, 200)
    pages = torch.cat((cache.sliding, cache.full)).flatten().tolist()
    assert len(set(pages)) == len(pages)
    assert 0 not in pages


def test_a_gauge_measures_the_settled_half_or_says_nothing() -> None:
    gauge = PowerMeter()
    assert gauge.summary() == {}
    gauge.limit = 700.0
    told = [(100.0, 1980, 30), (100.0, 1980, 31), (600.0, 1500, 60), (700.0, 1700, 65)]
    gauge.samples = [Sample(float(i), *sample) for i, sample in enumerate(told)]
    found = gauge.summary()
    assert found["watts"] == 650.0
    assert found["mhz"] == [1500, 1600.0, 1700]
    assert found["celsius"] == 65


def test_a_gauge_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(index: int | None = None) -> None:
        raise RuntimeError("cuda driver can't be loaded, is cuda enabled?")

    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", none)
    with PowerMeter() as gauge:
        pass
    assert gauge.summary() == {}


def test_a_gauge_reads_torchs_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda index=None: "mine")
    nvml = ModuleType("pynvml")
    told = {"EnforcedPowerLimit": 700_000, "PowerUsage": 600_000, "ClockInfo": 1980, "Temperature": 55,
            "CurrentClocksThrottleReasons": 0}  # fmt: skip
    for name, value in told.items():
        setattr(nvml, f"nvmlDeviceGet{name}", lambda handle, *kind, value=value: value * (handle == "mine"))
    nvml.__dict__.update(NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, NVMLError=RuntimeError)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    deadline = time.monotonic() + 60
    with PowerMeter() as gauge:
        while not gauge.samples and time.monotonic() < deadline:
            time.sleep(0.01)
    assert gauge.summary() == {"watts": 600.0, "limit_watts": 700.0, "mhz": [1980, 1980, 1980], "celsius": 55,
                               "throttled": {}}  # fmt: skip


def test_rates_name_the_bound() -> None:
    gpu = GPUS["h200"]
    achieved = phase_timing.rates(Work(bytes=4.5e12, flops=1e12), 2.0, gpu)
    assert achieved == {"bound": "memory", "tb_per_s": pytest.approx(2.25), "tflop_per_s": pytest.approx(0.5)}
    assert phase_timing.rates(Work(bytes=1.0, flops=790e12), 4.0, gpu)["bound"] == "compute"


def test_a_phase_above_its_ceiling_has_no_figure() -> None:
    """Two seconds' worth of bytes in one: not all of it was really read."""
    cell, floor = Cell("phase", path="x"), Work(bytes=9e12).seconds(GPUS["h200"]) * 1e6
    time_it = partial(phase_timing.timed, cell, 1e6, FigureCeiling(floor, "H200"), {})
    assert "passes its ceiling" in measure_cell(cell, time_it).refused
    assert measure_cell(cell, partial(phase_timing.timed, cell, 2.1e6, FigureCeiling(floor, "H200"), {})).figures


def test_the_reference_is_not_the_native_path(model: GptOss) -> None:
    assert phase_timing.not_native(model) == []
    model = load.load_model(load.resolve_model("random:small"), REFERENCE)
    found = phase_timing.not_native(model)
    assert "reference.moe is the reference" in found
    assert len(found) == len({b.phase.name for bound in model.plan.bound.values() for b in bound})


@pytest.mark.gpu
def test_figures_on_a_gpu() -> None:
    """The embedded model: figures have ceilings, phases alone add up to about a step, categories to all of it."""
    from halfbyte.lab import timeline

    gpu = load.load_model(load.resolve_model(None), device="cuda")
    cell = Cell("decode", "tiny", path="graph")
    with torch.inference_mode():
        tg = device_timing.time_graph(gpu, cell, 2, 100, 16, 2)
        pp = device_timing.time_chunks(gpu, cell, 200, 128, 64, 2)
        for result in (tg, pp):
            assert result.figure("speed").share is not None, result.refused
        assert device_timing.time_sustained(gpu, cell, 2, 100, 0.3).detail["steps"] >= 128
        results = phase_timing.time_phases(gpu, cell, 16, 100)
        assert results[-1].cell.path == "all phases"
        assert all(r.figure("time").value > 0 for r in results)
        for p in (timeline.decode_profile(gpu, 4, 100, 1), timeline.prefill_profile(gpu, 128)):
            assert sum(line.us for line in p.lines) == pytest.approx(p.busy_us)
            assert p.launches >= 1
            assert "MoE" in {part for line in p.lines for part in line.label.split(" + ")}
