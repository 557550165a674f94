"""The reproducibility record: everything about this machine and this build that a figure depends on.

A probe that fails costs its own entry and nothing else: the entry is None, and `probes_failed` says why. Where things
lie is told as far as it matters (in the checkout, in the environment, at home), not as a path of this machine; of the
process's variables those are kept that change how engines run, and no key. What one installation hides of another is
flagged: a figure of the wrong copy is the oldest mistake there is.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import halfbyte
from halfbyte.gates import Gates, cache_folder, child_environment
from halfbyte.installed import commit, container, imports, version

SCHEMA = 2
PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "gguf", "llguidance", "cuda-bindings",
    "nvidia-ml-py", "vllm", "flashinfer-python", "sglang", "transformers", "llama-cpp-python",
)  # fmt: skip
# Variables that change how an engine runs. Keys and tokens are never among them (`child_environment`).
VARIABLES = re.compile(
    r"^(HALFBYTE|VLLM|SGLANG|SGL|LLAMA|GGML|FLASHINFER|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|NCCL|UCX)_"
)
HOST_FILES = {
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "turbo_off": "/sys/devices/system/cpu/intel_pstate/no_turbo",
    "huge_pages": "/sys/kernel/mm/transparent_hugepage/enabled",
}


def collect(gates: Gates | None = None) -> dict[str, Any]:
    probes: dict[str, Callable[[], Any]] = {
        "halfbyte": lambda: halfbyte.__version__,
        "commit": commit,
        "sources": source_hash,
        "python": platform.python_version,
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "container": container,
        "cpu": cpu_name,
        "cores": os.cpu_count,
        "cores_usable": lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host": host,
        "memory_bytes": lambda: psutil.virtual_memory().total,
        "memory_available_bytes": lambda: psutil.virtual_memory().available,
        "packages": lambda: {name: version(name) for name in PACKAGES},
        "installed": installed_hash,
        "imports": imports,
        "variables": variables,
        "gpus": gpus,
        "driver": driver,
        "kernel_cache": kernel_cache,
        "use": use,
    }
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    failed = {}
    for name, probe in probes.items():
        try:
            record[name] = probe()
        except Exception as e:  # whatever a driver or a file system throws: the figures are worth more than this entry
            record[name] = None
            failed[name] = f"{type(e).__name__}: {e}"[:200]
    if gates is not None:
        record["gates"] = gates.as_dict()
    if failed:
        record["probes_failed"] = failed
    return record


def source_hash(room: str = "kernels") -> str:
    """Hash of a room's sources: a receipt carries it, and is stale when it changes."""
    digest = hashlib.sha256()
    base = Path(halfbyte.__file__).parent / room
    for path in sorted(p for p in base.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")):
        digest.update(path.relative_to(base).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernel_cache() -> dict[str, dict[str, Any]]:
    """What is compiled already, by whose cache: a start with these empty is a cold one."""
    triton = child_environment().get("TRITON_CACHE_DIR")
    folders = {
        "cuda": (cache_folder("cubin"), "*.cubin"),
        "cpu": (cache_folder("cpu"), "*.so"),
        "triton": (Path(triton) if triton else Path.home() / ".triton" / "cache", "*.cubin"),
    }
    caches = {}
    for name, (folder, pattern) in folders.items():
        files = [p for p in folder.rglob(pattern) if p.is_file()] if folder.is_dir() else []
        location = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
        caches[name] = {"folder": location, "kernels": len(files), "bytes": sum(p.stat().st_size for p in files)}
    return caches


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    devices = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append(
            {
                "name": p.name,
                "capability": f"sm{p.major}{p.minor}",
                "memory_bytes": p.total_memory,
                "memory_kind": "unified" if getattr(p, "is_integrated", False) else "of its own",
                "multiprocessors": p.multi_processor_count,
                "cuda": torch.version.cuda,
                "settings": gpu_settings(i),
            }
        )
    return devices


def gpu_settings(index: int) -> dict[str, Any]:
    """Clocks, limits and modes, as far as the driver tells: each entry for itself, None where it is not allowed."""
    import pynvml as nvml

    handle = torch.cuda._get_pynvml_handler(index)
    ask: dict[str, Callable[[], Any]] = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_mhz_most": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "memory_mhz_most": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "memory_bus_bits": lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle),
        "limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "limit_watts_default": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3,
        "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle)),
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0]),
    }
    values: dict[str, Any] = {}
    for name, value in ask.items():
        try:
            values[name] = value()
        except Exception:  # N/A on this board, or not allowed in this container
            values[name] = None
    return values


def driver() -> dict[str, Any] | None:
    """Versions of the GPU's driver and libraries; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    import pynvml as nvml

    nvml.nvmlInit()
    number = nvml.nvmlSystemGetCudaDriverVersion()
    return {
        "version": str(nvml.nvmlSystemGetDriverVersion()),
        "cuda_most": f"{number // 1000}.{number % 1000 // 10}",
        "cuda_of_torch": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


# ---- what is installed, and which copy of it runs -------------------------------------------------------------------


def installed_hash() -> dict[str, Any]:
    """How many distributions there are and a hash of their names and versions: equal hashes, equal environments."""
    names = sorted({f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()})
    return {"count": len(names), "hash": hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]}


def variables() -> dict[str, str]:
    selected = {name: value for name, value in child_environment().items() if VARIABLES.match(name)}
    home = str(Path.home())
    return {name: value.replace(home, "~") for name, value in sorted(selected.items())}


# ---- the host -------------------------------------------------------------------------------------------------------


def host() -> dict[str, Any]:
    """What decides how evenly a CPU runs: its governor, neighbours (steal, load), swap."""
    times = psutil.cpu_times()
    facts: dict[str, Any] = {
        "load": [round(n, 2) for n in psutil.getloadavg()],
        "steal_share": round(getattr(times, "steal", 0.0) / max(1e-9, sum(times)), 5),
        "swap_used_bytes": psutil.swap_memory().used,
    }
    for name, file in HOST_FILES.items():
        path = Path(file)
        facts[name] = path.read_text(encoding="utf-8").strip() if path.is_file() else None
    return facts


def use() -> dict[str, Any]:
    """What this process and the ones it started took so far: memory at its peak, and cores on average."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    scale = 1 if sys.platform == "darwin" else 1024
    seconds = time.time() - psutil.Process().create_time()  # with the start of the interpreter, as its CPU time is
    cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    usage: dict[str, Any] = {
        "peak_memory_bytes": own.ru_maxrss * scale,
        "peak_memory_bytes_of_children": children.ru_maxrss * scale,
        "seconds": round(seconds, 1),
        "cores_busy": round(cpu / max(seconds, 1e-9), 2),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        usage["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return usage
