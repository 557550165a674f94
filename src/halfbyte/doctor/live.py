"""Answers of the machine that this runs on: files, programs that only look, and what Python knows of itself.

Every answer is JSON and small. Keys and tokens are never among them, command lines of other people's processes neither,
and the home folder is `~`, so that a record can be shown to a stranger. Changes nothing; writes nothing; the disk is
read to see how fast it is, a quarter of a gigabyte at most.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from halfbyte import caches, installed, memory
from halfbyte.doctor.machine import Answer, Machine
from halfbyte.doctor.model_files import look_at
from halfbyte.gates import child_environment

COMMAND_S = 20
TORCH_S = 120
FILE_BYTES = 1 << 16
SPEED_BYTES = 256 << 20
SPEED_S = 3.0
BLOCK = 4 << 20
PACKAGES = (
    "halfbyte", "torch", "triton", "vllm", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache",
    "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "fastsafetensors",
    "openai-harmony", "numpy", "ray",
)  # fmt: skip
VARIABLES = re.compile(
    r"^(HALFBYTE_|VLLM_|FLASHINFER_|CUDA_|NVIDIA_|TORCH|PYTORCH_|TRITON_|NCCL_|GLOO_|TP_SOCKET|UCX_|TIKTOKEN_|HF_HOME"
    r"|MAX_JOBS$|NVCC_THREADS$|OMP_NUM_THREADS$|PYTHONPATH$|LD_LIBRARY_PATH$|SAFETENSORS_)"
)
ENGINES = ("halfbyte", "vllm", "sglang", "llama-server", "ollama", "trtllm-serve", "ray")
GUARDS = ("earlyoom", "systemd-oomd", "nohang")
FIRST = (
    "systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runit", "bash", "sh", "python",
    "python3", "halfbyte", "vllm",
)  # fmt: skip
COMPILERS = ("cicc", "ptxas", "nvcc", "cc1plus", "ninja")
KERNEL_LOG = re.compile(r"NVRM: Xid|NV_ERR_NO_MEMORY|Out of memory: Killed|oom-kill:")
TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
found["archs"] = torch.cuda.get_arch_list()
if found["available"]:
    p = torch.cuda.get_device_properties(0)
    found |= {"capability": [p.major, p.minor], "integrated": bool(getattr(p, "is_integrated", False))}
    found["cudnn"] = torch.backends.cudnn.version()
print(json.dumps(found))
"""


def this_machine() -> Machine:
    return Machine(_answer)


def _answer(kind: str, name: str) -> Answer:
    try:
        return ANSWERS[kind](name)
    except (OSError, ValueError, psutil.Error, subprocess.SubprocessError):
        return None  # not there, not allowed, not to be understood: the checks know None


def file(path: str) -> str | None:
    with open(path, "rb") as f:
        return f.read(FILE_BYTES).decode(errors="replace")


def folder(path: str) -> list[str]:
    return sorted(os.listdir(path))


def command(line: str) -> dict[str, Any] | None:
    words = line.split()
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"status": -1, "output": f"no answer in {COMMAND_S} s"}
    return {"status": done.returncode, "output": (done.stdout or done.stderr)[:FILE_BYTES]}


def variables(_: str) -> dict[str, str]:
    home = str(Path.home())
    kept = {name: value for name, value in child_environment().items() if VARIABLES.match(name)}
    return {name: value.replace(home, "~") for name, value in sorted(kept.items())}


def packages(_: str) -> dict[str, str]:
    found = {name: installed.version(name) for name in PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def torch_in_a_process(_: str) -> dict[str, Any]:
    """In a process of its own: one that crashes or hangs while it loads is what somebody wants to hear of."""
    if installed.version("torch") is None:
        return {"error": "torch is not installed"}
    try:
        done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {TORCH_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1][:300].replace(str(Path.home()), "~")}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def ptxas(_: str) -> str | None:
    """The release of the assembler that Triton calls for newer GPUs: the one that is named, else its own."""
    named = child_environment().get("TRITON_PTXAS_PATH")
    spec = importlib.util.find_spec("triton")
    own = Path((spec.submodule_search_locations or [""])[0], "backends", "nvidia", "bin") if spec else None
    candidates = [Path(named)] if named else [own / "ptxas-blackwell", own / "ptxas"] if own else []
    program = next((p for p in candidates if p.is_file()), None)
    if program is None:
        return None
    told = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=COMMAND_S).stdout
    release = re.search(r"release (\d+\.\d+)", told)
    return release[1] if release else None


def system(_: str) -> dict[str, str]:
    return {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}


def cores(_: str) -> dict[str, int]:
    total = os.cpu_count() or 1
    return {"total": total, "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total}


def cgroup_memory(_: str) -> list[dict[str, int]]:
    return [{"limit": limit, "left": left} for limit, left in memory.cgroup_limits()]


def disk(path: str) -> dict[str, Any]:
    """Of the file system that a folder is on, or will be once it is made."""
    place = Path(path).expanduser()
    while not place.exists():
        place = place.parent
    use = shutil.disk_usage(place)
    return {"total": use.total, "free": use.free, "kind": _kind(place), "writable": os.access(place, os.W_OK)}


def _kind(place: Path) -> str | None:
    """ext4, overlay, tmpfs, nfs4: of the longest mount point above."""
    best, kind = "", None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        if place.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def read_speed(path: str) -> dict[str, float] | None:
    """Bytes/s of the disk, past the page cache where the file system allows that."""
    place, direct = Path(path).expanduser(), getattr(os, "O_DIRECT", 0)
    if place.stat().st_size < 16 * BLOCK:
        return None
    try:
        handle = os.open(place, os.O_RDONLY | direct)
    except OSError:
        handle = os.open(place, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer, done, start = mmap.mmap(-1, BLOCK), 0, time.perf_counter()
    try:
        while done < SPEED_BYTES and time.perf_counter() - start < SPEED_S:
            count = os.preadv(handle, [buffer], done)
            done += count
            if count < BLOCK:
                break
        seconds = time.perf_counter() - start
    finally:
        os.close(handle)
        buffer.close()
    return {"bytes": done, "seconds": round(seconds, 4)}


def port(name: str) -> dict[str, Any] | None:
    """Who has it; None if nobody has."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", int(name)))
            return None
        except OSError as e:
            reason = e.strerror
    for c in psutil.net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN and c.laddr.port == int(name) and c.pid:
            return {"pid": c.pid, "program": _engine(psutil.Process(c.pid)) or psutil.Process(c.pid).name()}
    return {"pid": None, "program": None, "reason": reason}


def _engine(process: psutil.Process) -> str | None:
    """Which engine a process is of; its arguments stay its own."""
    try:
        words = process.cmdline()[:4]
    except psutil.Error:
        return None
    for before, word in zip(("", *words), words):
        name = word.split(".")[0] if before == "-m" else Path(word).name
        if name in ENGINES:
            return name
    title = words[0].partition("::")[0].lower() if words and "::" in words[0] else ""  # as Ray and vLLM call theirs
    return title if title in ENGINES else None


def processes(_: str) -> list[dict[str, Any]]:
    """Engines, guards, compilers and zombies; nobody else."""
    found = []
    for p in psutil.process_iter(["pid", "ppid", "name", "status", "memory_info"]):
        name, zombie = p.info["name"] or "", p.info["status"] == psutil.STATUS_ZOMBIE
        engine = None if zombie or p.pid == os.getpid() else _engine(p)
        if not (zombie or engine or name in GUARDS or name in COMPILERS):
            continue
        memory = p.info["memory_info"]
        found.append(
            {"pid": p.pid, "parent": p.info["ppid"], "name": engine or name, "zombie": zombie,
             "bytes": memory.rss if memory else 0}
        )  # fmt: skip
    return found


def triton_module() -> bool:
    """Whether the one module that Triton needs a C compiler for lies compiled in its cache."""
    cache = Path(child_environment().get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    return any(cache.glob("*/cuda_utils*.so"))


def first_process(_: str) -> str:
    """By name where it is a usual one: an init, a shell, an engine."""
    name = (file("/proc/1/comm") or "").strip()
    return name if name in FIRST else "another"


def limits(_: str) -> dict[str, int]:
    """Soft limits; -1: none."""
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def kernel_log(_: str) -> list[str] | None:
    """Lines that tell of GPUs that fell over and of processes that were killed; None if it is not to be read."""
    told = command("dmesg --color=never")
    if told is None or told["status"] != 0:
        return None
    return [line[:200] for line in told["output"].splitlines() if KERNEL_LOG.search(line)][-20:]


def cpu_kernels(_: str) -> dict[str, Any]:
    """A library that is here for this CPU, or what could make one."""
    from halfbyte.kernels.cpu import build
    from halfbyte.kernels.cpu.library import usable_sets

    here = [s.name for s in usable_sets() if build.existing_file(s) is not None]
    try:
        return {
            "library": here[0] if here else None,
            "compiler": build.compiler(),
            "sets": [s.name for s in usable_sets()],
        }
    except build.Unavailable as e:
        return {"library": here[0] if here else None, "compiler": None, "reason": str(e)}


def stale_entries(_: str) -> list[dict[str, Any]]:
    """By cache and reason: how many, how large, and one of them by name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for module in caches.MODULES.values():
        for entry in module.entries():
            if entry.stale:
                told = {"module": module.name, "stale": entry.stale, "name": entry.name, "count": 0, "bytes": 0}
                same = found.setdefault((module.name, entry.stale), told)
                same["count"] += 1
                same["bytes"] += entry.bytes
    return list(found.values())


ANSWERS: dict[str, Callable[[str], Answer]] = {
    "file": file,
    "folder": folder,
    "command": command,
    "variables": variables,
    "packages": packages,
    "program": lambda name: None if shutil.which(name) is None else name,
    "imports": lambda _: installed.imports(),
    "container": lambda _: installed.container(),
    "commit": lambda _: installed.commit(),
    "torch": torch_in_a_process,
    "ptxas": ptxas,
    "system": system,
    "cores": cores,
    "cgroup_memory": cgroup_memory,
    "disk": disk,
    "read_speed": read_speed,
    "port": port,
    "processes": processes,
    "first_process": first_process,
    "limits": limits,
    "kernel_log": kernel_log,
    "caches": stale_entries,
    "cpu_kernels": cpu_kernels,
    "triton_module": lambda _: triton_module(),
    "python_headers": lambda _: Path(sysconfig.get_path("include"), "Python.h").is_file(),
    "model": lambda name: look_at(Path(name).expanduser()),
}
