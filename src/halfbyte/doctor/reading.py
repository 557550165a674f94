"""Parses a machine's answers for the checks: /proc/meminfo, nvidia-smi's GPUs, versions.

All functions are pure: everything comes from the answers. nvidia-smi's [N/A] becomes None, never zero.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from halfbyte.doctor.machine import Machine

GIB = 1 << 30
GPU_FIELDS = (
    "name",
    "compute_cap",
    "driver_version",
    "memory.total",
    "memory.free",
    "clocks.sm",
    "clocks.max.sm",
    "utilization.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "temperature.gpu",
    "persistence_mode",
    "compute_mode",
)
GPU_QUERY = f"nvidia-smi --query-gpu={','.join(GPU_FIELDS)} --format=csv,noheader,nounits"
REASONS_QUERY = "nvidia-smi --query-gpu=clocks_event_reasons.active --format=csv,noheader"
OLD_REASONS_QUERY = "nvidia-smi --query-gpu=clocks_throttle_reasons.active --format=csv,noheader"
MIG_QUERY = "nvidia-smi --query-gpu=mig.mode.current --format=csv,noheader"
CUDA_QUERY = "nvidia-smi -q -d COMPUTE"
PROCESSES_QUERY = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
# Published checkpoints, as they lie on disk.
CHECKPOINTS = {"20b": 13_800_000_000, "120b": 65_300_000_000}


@dataclass(frozen=True)
class GpuState:
    name: str
    capability: tuple[int, int] | None
    driver: str
    total: int | None  # bytes; None on unified memory
    free: int | None
    mhz: float | None
    mhz_most: float | None
    busy: float | None  # per cent
    watts: float | None
    limit_watts: float | None
    limit_watts_default: float | None
    celsius: float | None
    persistence: str
    compute_mode: str
    reasons: int  # why its clock is lower than requested, as NVML's bits

    @property
    def unified(self) -> bool:
        """Whether the GPU uses the host's memory: the driver then reports no memory of its own."""
        return self.total is None or "GB10" in self.name


def gpus(machine: Machine) -> list[GpuState]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(machine.output(GPU_QUERY).splitlines())]
    rows = [row for row in rows if len(row) == len(GPU_FIELDS)]
    if not rows:
        return []
    reasons = (machine.output(REASONS_QUERY) or machine.output(OLD_REASONS_QUERY)).split()
    cards = []
    for i, row in enumerate(rows):
        value = dict(zip(GPU_FIELDS, row))
        capability = re.fullmatch(r"(\d+)\.(\d+)", value["compute_cap"])
        total, free = number(value["memory.total"]), number(value["memory.free"])
        bits = reasons[i] if i < len(reasons) else ""
        cards.append(
            GpuState(
                name=value["name"].removeprefix("NVIDIA "),
                capability=(int(capability[1]), int(capability[2])) if capability else None,
                driver=value["driver_version"],
                total=None if total is None else int(total * 2**20),
                free=None if free is None else int(free * 2**20),
                mhz=number(value["clocks.sm"]),
                mhz_most=number(value["clocks.max.sm"]),
                busy=number(value["utilization.gpu"]),
                watts=number(value["power.draw"]),
                limit_watts=number(value["power.limit"]),
                limit_watts_default=number(value["power.default_limit"]),
                celsius=number(value["temperature.gpu"]),
                persistence=value["persistence_mode"],
                compute_mode=value["compute_mode"],
                reasons=int(bits, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", bits) else 0,
            )
        )
    return cards


def unified(machine: Machine) -> bool:
    return any(gpu.unified for gpu in gpus(machine))


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def meminfo(machine: Machine) -> dict[str, int]:
    """The counters of /proc/meminfo in bytes, by the kernel's names."""
    counters = {}
    for line in (machine.file("/proc/meminfo") or "").splitlines():
        match = re.match(r"(\w+):\s+(\d+) kB", line)
        if match:
            counters[match[1]] = int(match[2]) * 1024
    return counters


def available(machine: Machine) -> int | None:
    """MemAvailable, or what the tightest cgroup leaves."""
    host = meminfo(machine).get("MemAvailable")
    left = [int(group["left"]) for group in machine.ask("cgroup_memory") or ()]
    limits = [n for n in (host, *left) if n is not None]
    return min(limits) if limits else None


def version(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: 580.142 gives (580, 142), no text gives ()."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def driver_cuda(machine: Machine) -> tuple[int, ...]:
    """The newest CUDA that the driver runs."""
    match = re.search(r"CUDA[^\n:]*Version\s*:\s*([\d.]+)", machine.output(CUDA_QUERY))
    return version(match[1]) if match else ()


def weights(machine: Machine, model: str | None) -> int | None:
    """A model's size in bytes: that of its files, or of the published checkpoint with that name."""
    if model is None:
        return None
    files = machine.ask("model", model)
    if files is not None:
        return int(files["bytes"])
    size = re.search(r"(120b|20b)", model)
    return CHECKPOINTS[size[1]] if size else None


def gib(n: float) -> str:
    return f"{n / GIB:.1f} GiB"
