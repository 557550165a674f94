"""What torch's GPU draws and how fast it runs while something runs on it: watts, MHz and degrees, sampled by a thread.

    with PowerMeter() as gauge:
        work()
    gauge.summary()  # {"watts": ..., "mhz": [least, median, most], ...}, or {} where nobody can say

Speed that is bound by power falls within seconds of a run's begin; a figure of a quarter second does not show it.
"""

from __future__ import annotations

import statistics
import threading
from types import TracebackType
from typing import Any

import torch

EVERY_S = 0.05


class PowerMeter:
    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []  # watts, MHz, degrees
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.limit: float | None = None  # watts

    def __enter__(self) -> PowerMeter:
        try:
            import pynvml

            # torch's: it knows which of the machine's cards its own is (CUDA_VISIBLE_DEVICES)
            handle = torch.cuda._get_pynvml_handler()
            self.limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
        except Exception:  # no driver, not allowed: then there are no samples, and the summary says nothing
            return self
        self._thread = threading.Thread(target=self._sample, args=(pynvml, handle), daemon=True)
        self._thread.start()
        return self

    def _sample(self, nvml: Any, handle: Any) -> None:
        while not self._over.wait(EVERY_S):
            try:
                watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                degrees = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            except nvml.NVMLError:
                return
            self._samples.append((watts, mhz, degrees))

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Of the second half of the samples: by then the card has settled."""
        late = self._samples[len(self._samples) // 2 :]
        if not late:
            return {}
        watts, mhz, degrees = zip(*late)
        return {
            "watts": statistics.mean(watts), "limit_watts": self.limit,
            "mhz": [min(mhz), statistics.median(mhz), max(mhz)], "celsius": max(degrees),
        }  # fmt: skip
