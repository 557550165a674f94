"""The power meter on what a driver really said: nvidia-smi's log of an H200, first idle and then serving 64 streams.

The log (`recorded/h200-power.csv`: time, watts, MHz, degrees, reasons for lower clocks, a row each quarter second) is
played through a stand-in for the driver's library. That card only ever met its power limit; heat is made up here.
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from halfbyte import gpu_sensor
from halfbyte.gpu_sensor import nvml_sensor
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import Cell, Result, figure

LOG = Path(__file__).parent / "recorded" / "h200-power.csv"
LIMIT = 700.0
IDLE = 12  # rows before the work began


class Row(NamedTuple):
    at: float
    watts: float
    mhz: int
    celsius: int
    reasons: int


def rows() -> list[Row]:
    found = []
    for line in LOG.read_text(encoding="utf-8").splitlines():
        when, watts, mhz, celsius, reasons = (part.strip() for part in line.split(","))
        at = datetime.datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        found.append(Row(at, float(watts.removesuffix(" W")), int(mhz.removesuffix(" MHz")), int(celsius),
                         int(reasons, 16)))  # fmt: skip
    return found


class Driver(ModuleType):
    """What the driver's library says, row by row; then the card is gone."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, played: list[Row], reasons: list[int]) -> None:
        super().__init__("pynvml")
        self._rows: Iterator[tuple[Row, int]] = iter(zip(played, reasons, strict=True))
        self.now, self.reasons = played[0], 0
        self.over = threading.Event()

    def nvmlDeviceGetEnforcedPowerLimit(self, card: str) -> int:
        assert card == "the card of torch"
        return int(1000 * LIMIT)

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:
        try:
            self.now, self.reasons = next(self._rows)
        except StopIteration:
            self.over.set()
            raise self.NVMLError("the card is gone") from None
        return round(1000 * self.now.watts)

    def nvmlDeviceGetClockInfo(self, card: str, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return self.now.mhz

    def nvmlDeviceGetTemperature(self, card: str, kind: int) -> int:
        assert kind == self.NVML_TEMPERATURE_GPU
        return self.now.celsius

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: str) -> int:
        return self.reasons


def watched(monkeypatch: pytest.MonkeyPatch, played: list[Row], reasons: list[int] | None = None) -> PowerMeter:
    """A meter that has seen these rows, by the driver's interface and at the times of the log."""
    driver = Driver(played, reasons or [r.reasons for r in played])
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda *_: "the card of torch", raising=False)
    monkeypatch.setattr(gpu_sensor, "time", SimpleNamespace(monotonic=lambda: driver.now.at))
    found = nvml_sensor()
    assert found is not None
    with PowerMeter(*found, every_s=0.0) as meter:
        assert driver.over.wait(30)
    return meter


def judged(meter: PowerMeter) -> Result:
    return meter.judge(Result(Cell("decode"), (figure("speed", "tok/s", 100.0), *meter.figures(50.0, 0.5))))


def test_watts_clocks_and_joules_are_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows()
    meter = watched(monkeypatch, whole)
    assert [(s.at, s.watts, s.mhz, s.celsius, s.reasons) for s in meter.samples] == [tuple(r) for r in whole]
    late = whole[len(whole) // 2 :]
    said = meter.summary()
    assert said["watts"] == pytest.approx(np.mean([r.watts for r in late]))
    assert said["mhz"] == [min(r.mhz for r in late), np.median([r.mhz for r in late]), max(r.mhz for r in late)]
    assert said["celsius"] == max(r.celsius for r in whole)
    assert said["limit_watts"] == LIMIT
    limited = sum(r.reasons == 0x4 for r in whole) / len(whole)
    assert said["throttled"] == {"power limit": limited}  # idling is no reason
    assert limited > 0.5
    joules = np.trapezoid([r.watts for r in whole], [r.at for r in whole])
    assert meter.joules() == pytest.approx(joules)
    assert max(r.watts for r in whole[:IDLE]) < 100 < said["watts"]  # the log has both


def test_work_that_draws_more_costs_more_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows()
    busy, idle = (watched(monkeypatch, part) for part in (whole[IDLE:], whole[:IDLE]))
    result = judged(busy)
    assert result.state == "measured"
    assert result.figure("energy_per_token").value == pytest.approx(busy.summary()["watts"] * 0.5 / 50)
    assert result.figure("energy_per_token").value > 4 * judged(idle).figure("energy_per_token").value


@pytest.mark.parametrize(
    ("bit", "share", "state"),
    [
        (0x40, 0.5, "INVALID"),
        (0x8, 0.1, "INVALID"),
        (0x20, 0.02, "measured"),
        (0x4, 1.0, "measured"),
        (0x1, 1.0, "measured"),
    ],
)
def test_reasons_made_up_beside_the_log(monkeypatch: pytest.MonkeyPatch, bit: int, share: float, state: str) -> None:
    """Heat and a slowdown by the board count from a twentieth of the time on; the card's own power limit never."""
    busy = rows()[IDLE:]
    reasons = [bit if i < share * len(busy) else 0 for i in range(len(busy))]
    result = judged(watched(monkeypatch, busy, reasons))
    assert result.state == state
    if state == "INVALID":
        assert "the GPU was throttled" in result.refused
        assert not result.figures


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", missing, raising=False)
    assert nvml_sensor() is None
    with PowerMeter() as meter:
        pass
    assert meter.summary() == {}
    assert meter.joules() is None
    assert judged(meter).state == "measured"
