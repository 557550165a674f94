"""The reproducibility record: everything about this machine and this build that a figure depends on."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

import halfbyte
from halfbyte.gates import Gates, cache_folder, child_environment

SCHEMA = 1
PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "tiktoken", "gguf", "llguidance", "cuda-bindings", "vllm")


def collect(gates: Gates | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "halfbyte": halfbyte.__version__,
        "commit": commit(),
        "sources": source_hash(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "packages": {name: version(name) for name in PACKAGES},
        "gpus": gpus(),
        "kernel_cache": kernel_cache(),
    }
    if gates is not None:
        record["gates"] = gates.as_dict()
    return record


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with + if files differ from it; None outside a checkout."""
    root = Path(halfbyte.__file__).parents[2]
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
                "multiprocessors": p.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        )
    return devices
