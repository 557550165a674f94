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
import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

import halfbyte
from halfbyte.gates import Gates, cache_folder, child_environment

SCHEMA = 2
PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "gguf", "llguidance", "cuda-bindings",
    "nvidia-ml-py", "vllm", "flashinfer-python", "sglang", "transformers", "llama-cpp-python",
)  # fmt: skip
IMPORTED = {"halfbyte": "halfbyte", "vllm": "vllm", "flashinfer": "flashinfer-python"}  # module -> distribution
# Variables that change how an engine runs. Keys and tokens are never among them (`child_environment`).
VARIABLES = re.compile(
    r"^(HALFBYTE|VLLM|SGLANG|SGL|LLAMA|GGML|FLASHINFER|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|NCCL|UCX)_"
)
HOST_FILES = {
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "turbo_off": "/sys/devices/system/cpu/intel_pstate/no_turbo",
    "huge_pages": "/sys/kernel/mm/transparent_hugepage/enabled",
}
_BEGAN = time.monotonic()


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


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with + if files differ from it; None outside a checkout."""
    return commit_of(Path(halfbyte.__file__).parents[2])


def commit_of(root: Path) -> str | None:
    try:
        sha = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=5, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return sha + ("+" if dirty else "")


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
        place = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
        caches[name] = {"folder": place, "kernels": len(files), "bytes": sum(p.stat().st_size for p in files)}
    return caches


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def need_gpu() -> None:
    """Ends a script that measures a GPU where there is none: one sentence, exit status 2."""
    if not torch.cuda.is_available():
        print("this measures a CUDA GPU, and torch sees none: run it on a machine that has one.", file=sys.stderr)
        raise SystemExit(2)


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
    found: dict[str, Any] = {}
    for name, value in ask.items():
        try:
            found[name] = value()
        except Exception:  # N/A on this board, or not allowed in this container
            found[name] = None
    return found


def driver() -> dict[str, Any] | None:
    """Of the GPU; None where there is none."""
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


def place(path: Path) -> str:
    """Where a file lies, as far as another reader can use it."""
    path = path.resolve()
    roots = {"<checkout>": Path(halfbyte.__file__).parents[2], "<environment>": Path(sys.prefix), "~": Path.home()}
    for name, root in roots.items():
        if path.is_relative_to(root.resolve()):
            return f"{name}/{path.relative_to(root.resolve()).as_posix()}"
    return f"…/{'/'.join(path.parts[-2:])}"


def installed_hash() -> dict[str, Any]:
    """How many distributions there are and a hash of their names and versions: equal hashes, equal environments."""
    names = sorted({f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()})
    return {"count": len(names), "hash": hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]}


def imports() -> dict[str, Any]:
    """Which copy of halfbyte and of the engines an import takes, and which other copies it hides."""
    found: dict[str, Any] = {}
    for module, distribution in IMPORTED.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        taken = Path(spec.origin).resolve().parent
        others = sorted({str(c) for c in copies(module, distribution)} - {str(taken)})
        found[module] = {
            "path": place(taken),
            "version": version(distribution),
            "commit": commit_of(taken),
            "shadows": [place(Path(other)) for other in others],
        }
    return found


def copies(module: str, distribution: str) -> Iterator[Path]:
    """Every folder of that module that an import could take: on the path, or named by an editable installation."""
    for entry in sys.path:
        folder = Path(entry or ".") / module
        if (folder / "__init__.py").is_file():
            yield folder.resolve()
    for d in importlib.metadata.distributions(name=distribution):
        told = d.read_text("direct_url.json")
        url = json.loads(told) if told else {}
        if url.get("dir_info", {}).get("editable") and str(url.get("url", "")).startswith("file://"):
            root = Path(url["url"].removeprefix("file://"))
            yield from (f.resolve() for f in (root / module, root / "src" / module) if (f / "__init__.py").is_file())


def variables() -> dict[str, str]:
    kept = {name: value for name, value in child_environment().items() if VARIABLES.match(name)}
    home = str(Path.home())
    return {name: value.replace(home, "~") for name, value in sorted(kept.items())}


# ---- the host -------------------------------------------------------------------------------------------------------


def host() -> dict[str, Any]:
    """What decides how evenly a CPU runs: its governor, neighbours (steal, load), swap."""
    times = psutil.cpu_times()
    found: dict[str, Any] = {
        "load": [round(n, 2) for n in psutil.getloadavg()],
        "steal_share": round(getattr(times, "steal", 0.0) / max(1e-9, sum(times)), 5),
        "swap_used_bytes": psutil.swap_memory().used,
    }
    for name, file in HOST_FILES.items():
        path = Path(file)
        found[name] = path.read_text(encoding="utf-8").strip() if path.is_file() else None
    return found


def container() -> dict[str, str | None] | None:
    """Which kind, and its image where the container says it; None outside of one."""
    told = Path("/run/.containerenv")
    if told.is_file():
        named = re.search(r'^image="?([^"\n]+)', told.read_text(encoding="utf-8"), re.MULTILINE)
        return {"kind": "podman", "image": named[1] if named else None}
    label = Path("/etc/halfbyte-image")  # deploy's images write their own name there: Docker tells none
    image = label.read_text(encoding="utf-8").strip() if label.is_file() else None
    if Path("/.dockerenv").exists():
        return {"kind": "docker", "image": image}
    if "KUBERNETES_SERVICE_HOST" in child_environment():
        return {"kind": "kubernetes", "image": image}
    return None


def use() -> dict[str, Any]:
    """What this process and the ones it started took so far: memory at its peak, and cores on average."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    scale = 1 if sys.platform == "darwin" else 1024
    seconds = time.monotonic() - _BEGAN
    cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    found: dict[str, Any] = {
        "peak_memory_bytes": own.ru_maxrss * scale,
        "peak_memory_bytes_of_children": children.ru_maxrss * scale,
        "seconds": round(seconds, 1),
        "cores_busy": round(cpu / max(seconds, 1e-9), 2),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return found
