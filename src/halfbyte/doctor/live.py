"""Answers from the machine that this process runs on: files, read-only programs and facts about this Python.

Every answer is small JSON. Answers contain no keys, no tokens and no command lines of other processes, and the home
folder is written as `~`, so that a record can be shared. Nothing is changed or written. The speed test reads at most
256 MiB from the disk.
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
SCAN_S = 60  # for the weights of a model
FILE_BYTES = 1 << 16
SPEED_BYTES = 256 << 20
SPEED_S = 3.0
BLOCK = 4 << 20
PACKAGES = (
    "halfbyte",
    "torch",
    "triton",
    "vllm",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-ml-py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "fastsafetensors",
    "openai-harmony",
    "numpy",
    "ray",
)
VARIABLES = re.compile(
    r"^(HALFBYTE_|VLLM_|FLASHINFER_|CUDA_|NVIDIA_|TORCH|PYTORCH_|TRITON_|NCCL_|GLOO_|TP_SOCKET|UCX_|TIKTOKEN_|HF_HOME"
    r"|MAX_JOBS$|NVCC_THREADS$|OMP_NUM_THREADS$|PYTHONPATH$|LD_LIBRARY_PATH$|SAFETENSORS_)"
)
ENGINES = ("halfbyte", "vllm", "sglang", "llama-server", "ollama", "trtllm-serve", "ray")
GUARDS = ("earlyoom", "systemd-oomd", "nohang")
FIRST = (
    "systemd",
    "init",
    "tini",
    "dumb-init",
    "docker-init",
    "catatonit",
    "s6-svscan",
    "runit",
    "bash",
    "sh",
    "python",
    "python3",
    "halfbyte",
    "vllm",
)
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
        return None  # missing, forbidden or malformed: the checks accept None


def file(path: str) -> str | None:
    with open(path, "rb") as f:
        return f.read(FILE_BYTES).decode(errors="replace")


def folder(path: str) -> list[str]:
    return sorted(os.listdir(path))


def command(line: str) -> dict[str, Any] | None:
    arguments = line.split()
    if shutil.which(arguments[0]) is None:
        return None
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"status": -1, "output": f"no answer in {COMMAND_S} s"}
    return {"status": result.returncode, "output": (result.stdout or result.stderr)[:FILE_BYTES]}


def variables(_: str) -> dict[str, str]:
    home = str(Path.home())
    selection = {name: value for name, value in child_environment().items() if VARIABLES.match(name)}
    return {name: value.replace(home, "~") for name, value in sorted(selection.items())}


def packages(_: str) -> dict[str, str]:
    versions = {name: installed.version(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def torch_in_a_process(_: str) -> dict[str, Any]:
    """Import torch in a child process, so that a crash or a hang during the import becomes an answer."""
    if installed.version("torch") is None:
        return {"error": "torch is not installed"}
    try:
        result = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=TORCH_S)
    except subprocess.TimeoutExpired:
        return {"error": f"import torch took more than {TORCH_S} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return {"error": lines[-1][:300].replace(str(Path.home()), "~")}
    return dict(json.loads(result.stdout.splitlines()[-1]))


def model_contents(name: str) -> dict[str, Any]:
    """What a child process that has torch reads in a model's files: headers, vocabulary, weights."""
    path = str(Path(name).expanduser())
    command = [sys.executable, "-m", "halfbyte.model.file_check", path, str(SCAN_S)]
    environment = child_environment(PYTHONPATH=":".join(p for p in sys.path if p))
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SCAN_S + TORCH_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"reading it took more than {SCAN_S + TORCH_S} s"}
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return {"error": lines[-1][:300].replace(str(Path.home()), "~")}
    return dict(json.loads(result.stdout.splitlines()[-1].replace(str(Path.home()), "~")))


def ptxas(_: str) -> str | None:
    """The release of the ptxas that Triton calls for newer GPUs: TRITON_PTXAS_PATH, else the one in the package."""
    path = child_environment().get("TRITON_PTXAS_PATH")
    spec = importlib.util.find_spec("triton")
    own = Path((spec.submodule_search_locations or [""])[0], "backends", "nvidia", "bin") if spec else None
    candidates = [Path(path)] if path else [own / "ptxas-blackwell", own / "ptxas"] if own else []
    program = next((p for p in candidates if p.is_file()), None)
    if program is None:
        return None
    output = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=COMMAND_S).stdout
    release = re.search(r"release (\d+\.\d+)", output)
    return release[1] if release else None


def system(_: str) -> dict[str, str]:
    return {"machine": platform.machine(), "kernel": platform.release(), "python": platform.python_version()}


def cores(_: str) -> dict[str, int]:
    total = os.cpu_count() or 1
    return {"total": total, "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total}


def cgroup_memory(_: str) -> list[dict[str, int]]:
    return [{"limit": limit, "left": left} for limit, left in memory.cgroup_limits()]


def disk(path: str) -> dict[str, Any]:
    """Facts about the file system of a folder; for a missing folder, that of its nearest existing parent."""
    folder = Path(path).expanduser()
    while not folder.exists():
        folder = folder.parent
    use = shutil.disk_usage(folder)
    return {"total": use.total, "free": use.free, "kind": _kind(folder), "writable": os.access(folder, os.W_OK)}


def _kind(path: Path) -> str | None:
    """The file system's type (ext4, overlay, tmpfs, nfs4), from the longest mount point above the path."""
    best, kind = "", None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def read_speed(path: str) -> dict[str, float] | None:
    """Bytes read and seconds taken, past the page cache where the file system allows O_DIRECT."""
    file, direct = Path(path).expanduser(), getattr(os, "O_DIRECT", 0)
    if file.stat().st_size < 16 * BLOCK:
        return None
    try:
        handle = os.open(file, os.O_RDONLY | direct)
    except OSError:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer, position, start = mmap.mmap(-1, BLOCK), 0, time.perf_counter()
    try:
        while position < SPEED_BYTES and time.perf_counter() - start < SPEED_S:
            count = os.preadv(handle, [buffer], position)
            position += count
            if count < BLOCK:
                break
        seconds = time.perf_counter() - start
    finally:
        os.close(handle)
        buffer.close()
    return {"bytes": position, "seconds": round(seconds, 4)}


def port(name: str) -> dict[str, Any] | None:
    """The process that listens on a port; None if the port is free."""
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
    """The engine that a process belongs to. Its arguments are not recorded."""
    try:
        arguments = process.cmdline()[:4]
    except psutil.Error:
        return None
    for before, word in zip(("", *arguments), arguments):
        name = word.split(".")[0] if before == "-m" else Path(word).name
        if name in ENGINES:
            return name
    title = (
        arguments[0].partition("::")[0].lower() if arguments and "::" in arguments[0] else ""
    )  # as Ray and vLLM call theirs
    return title if title in ENGINES else None


def processes(_: str) -> list[dict[str, Any]]:
    """Engines, guards, compilers and zombies; no other processes."""
    rows = []
    for p in psutil.process_iter(["pid", "ppid", "name", "status", "memory_info"]):
        name, zombie = p.info["name"] or "", p.info["status"] == psutil.STATUS_ZOMBIE
        engine = None if zombie or p.pid == os.getpid() else _engine(p)
        if not (zombie or engine or name in GUARDS or name in COMPILERS):
            continue
        memory = p.info["memory_info"]
        rows.append(
            {
                "pid": p.pid,
                "parent": p.info["ppid"],
                "name": engine or name,
                "zombie": zombie,
                "bytes": memory.rss if memory else 0,
            }
        )
    return rows


def triton_module() -> bool:
    """Whether Triton's cache holds the compiled launcher, the one module for which Triton needs a C compiler."""
    cache = Path(child_environment().get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    return any(cache.glob("*/cuda_utils*.so"))


def first_process(_: str) -> str:
    """The name of process 1 if it is a usual one (an init, a shell, an engine), else "another"."""
    name = (file("/proc/1/comm") or "").strip()
    return name if name in FIRST else "another"


def limits(_: str) -> dict[str, int]:
    """Soft limits; -1 means unlimited."""
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def kernel_log(_: str) -> list[str] | None:
    """Lines about GPU errors and about processes killed for memory; None if the log cannot be read."""
    answer = command("dmesg --color=never")
    if answer is None or answer["status"] != 0:
        return None
    return [line[:200] for line in answer["output"].splitlines() if KERNEL_LOG.search(line)][-20:]


def cpu_kernels(_: str) -> dict[str, Any]:
    """The library of the CPU kernels for this CPU, or the compiler that could build one."""
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
    """Stale cache entries grouped by cache and reason: their count, their size and one name."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for module in caches.MODULES.values():
        for entry in module.entries():
            if entry.stale:
                group = {"module": module.name, "stale": entry.stale, "name": entry.name, "count": 0, "bytes": 0}
                same = groups.setdefault((module.name, entry.stale), group)
                same["count"] += 1
                same["bytes"] += entry.bytes
    return list(groups.values())


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
    "model_contents": model_contents,
    "model": lambda name: look_at(Path(name).expanduser()),
}
