"""Kernels and drivers that others have reported as bad for a GPU, with the source of each report.

None of them was measured by this project, so none is worse than a warning. A row is deleted once its fix is widespread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownBad:
    gpu: str  # a part of its name
    component: str  # kernel or driver
    pattern: str  # matches its version
    symptom: str
    fix: str
    source: str
    commands: tuple[str, ...] = ()

    def applies(self, gpu: str, versions: dict[str, str]) -> bool:
        return self.gpu in gpu and re.match(self.pattern, versions.get(self.component, "")) is not None


KNOWN_BAD = (
    KnownBad(
        "GB10",
        "kernel",
        r"6\.17\.0-1008-nvidia",
        "panics that leave the GPU unusable at every later start",
        "install a newer kernel of the same series (6.17.0-1014-nvidia or later) and take the power cord out once",
        "https://forums.developer.nvidia.com/t/366026",
        ("sudo apt update && sudo apt install linux-nvidia-hwe-24.04 && sudo reboot",),
    ),
    KnownBad(
        "GB10",
        "kernel",
        r"7\.0\.0-1019-nvidia",
        "NV_ERR_NO_MEMORY right after two machines meet over NCCL, then a host that no longer answers",
        "start the kernel of the 6.17 series again, or this one with kho=off",
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1358",
    ),
    KnownBad(
        "GB10",
        "driver",
        r"590\.",
        "CUDA graphs that never return",
        "install the driver of the 580 series",
        "https://conselara.dev/notes/dgx-spark-gb10-hardware-reference/",
        ("sudo apt install nvidia-driver-580-open && sudo reboot",),
    ),
)
