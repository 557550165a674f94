"""What the GPU draws and how fast it runs while something runs on it: watts, MHz, degrees and why it was slowed down.

    with PowerMeter() as meter:
        work()
    meter.summary()  # {"watts": ..., "mhz": [least, median, most], "throttled": {...}, ...}, or {} without a sensor
    meter.judge(result)  # INVALID where the card was throttled

Speed that is bound by power falls within seconds of a run's begin; a figure of a quarter second does not show it. A
card at its own power limit is what its owner bought and is only said; one slowed by heat, by its power supply or by
somebody else makes a figure INVALID. Where there is no driver, nothing is said: a missing meter fails no run."""

from __future__ import annotations

import dataclasses
import statistics
import threading
from types import TracebackType
from typing import Any

from halfbyte.gpu_sensor import Sample, Sensor, nvml_sensor
from halfbyte.lab.result import Figure, Result, figure

EVERY_S = 0.05
# NVML's bits for why a clock is lower than it could be.
REASONS = {
    0x0000000000000001: "idle",
    0x0000000000000002: "clocks set by its owner",
    0x0000000000000004: "power limit",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "waits for another card",
    0x0000000000000020: "heat (software)",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
    0x0000000000000100: "clocks of a display",
}
THROTTLED = ("hardware slowdown", "heat (software)", "heat (hardware)", "power brake")
THROTTLED_SHARE = 0.05  # of the samples


class PowerMeter:
    """`sensor` is the driver's, unless somebody brings one, for example of another machine."""

    def __init__(self, sensor: Sensor | None = None, limit: float | None = None, every_s: float = EVERY_S) -> None:
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._sensor, self.limit, self._every = sensor, limit, every_s  # watts, seconds

    def __enter__(self) -> PowerMeter:
        if self._sensor is None and (reading := nvml_sensor()) is not None:
            self._sensor, self.limit = reading
        if self._sensor is not None:
            self._thread = threading.Thread(target=self._watch, args=(self._sensor,), daemon=True)
            self._thread.start()
        return self

    def _watch(self, sensor: Sensor) -> None:
        while (sample := sensor()) is not None:
            self.samples.append(sample)
            if self._over.wait(self._every):
                return

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def throttled(self) -> dict[str, float]:
        """Reason -> share of the samples that named it, idling left out."""
        count = len(self.samples)
        shares = {name: sum(bool(s.reasons & bit) for s in self.samples) / count for bit, name in REASONS.items()
                  if count}  # fmt: skip
        return {name: share for name, share in shares.items() if share and name != "idle"}

    def summary(self) -> dict[str, Any]:
        """Watts and clocks of the second half of the samples: by then the card has settled."""
        late = self.samples[len(self.samples) // 2 :]
        if not late:
            return {}
        mhz = [s.mhz for s in late]
        return {
            "watts": statistics.mean(s.watts for s in late), "limit_watts": self.limit,
            "mhz": [min(mhz), statistics.median(mhz), max(mhz)], "celsius": max(s.celsius for s in self.samples),
            "throttled": self.throttled,
        }  # fmt: skip

    def joules(self) -> float | None:
        """Energy over the sampling period (trapezoidal rule)."""
        if len(self.samples) < 2:
            return None
        pairs = zip(self.samples, self.samples[1:])
        return sum((b.at - a.at) * (a.watts + b.watts) / 2 for a, b in pairs)

    def figures(self, tokens: float, seconds: float) -> list[Figure]:
        """Watts, and joules a token at that power; none without a sensor."""
        late = self.summary()
        if not late or not tokens:
            return []
        watts = [s.watts for s in self.samples[len(self.samples) // 2 :]]
        return [figure("power", "W", watts), figure("energy_per_token", "J", late["watts"] * seconds / tokens)]

    def judge(self, result: Result) -> Result:
        """With what was seen in its detail; INVALID where the card was slowed by something that is not its own."""
        summary = self.summary()
        if not summary:
            return result
        result = dataclasses.replace(result, detail={**result.detail, "power": summary})
        slowed = {
            name: share for name, share in self.throttled.items() if name in THROTTLED and share >= THROTTLED_SHARE
        }
        if not slowed:
            return result
        why = ", ".join(f"{name} {share:.0%} of the time" for name, share in slowed.items())
        return result.invalidated(f"the GPU was throttled: {why}")
