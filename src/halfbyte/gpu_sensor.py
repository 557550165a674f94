"""What the driver says of a GPU at this moment: watts, clock, degrees, and why the clock is lower than it could be.

Asks NVML, which takes no memory of the card and makes no context. Where nobody can say there is no sensor; nothing here
keeps a history or judges (`lab.measure.power` does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    at: float  # seconds of a steady clock
    watts: float
    mhz: int
    celsius: int
    reasons: int = 0  # NVML's bits for why a clock is lower than it could be


Sensor = Callable[[], Sample | None]  # None: it is gone


def nvml_sensor(index: int | None = None) -> tuple[Sensor, float | None] | None:
    """Of torch's GPU of that number, and its limit in watts; None where there is no driver, or it is not allowed."""
    try:
        import pynvml as nvml

        # torch's: it knows which of the machine's cards its own is (CUDA_VISIBLE_DEVICES)
        handle = torch.cuda._get_pynvml_handler(index)
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
    except Exception:  # no package, no library, not allowed: NVML has a dozen ways to say so
        return None

    def take() -> Sample | None:
        try:
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except nvml.NVMLError:
            return None
        return Sample(time.monotonic(), watts, mhz, degrees, reasons)

    return take, limit
