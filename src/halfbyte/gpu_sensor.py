"""Reads a GPU's power, clock, temperature and clock-limiting reasons from the driver.

NVML uses no memory on the card and creates no context. Without NVML there is no sensor. This module keeps no history
and judges nothing; `lab.measure.power` does.
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
    """The sensor of torch's GPU `index` and its power limit in watts; None without NVML or without permission."""
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
