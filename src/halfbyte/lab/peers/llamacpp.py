"""llama.cpp, built for this machine from the sources inside llama-cpp-python's sdist: its `llama-bench` and its server.

The build takes minutes and is kept under HALFBYTE_CACHE_DIR, one folder for each version and processor: the compiler is
told to use every instruction the processor has. Nothing of llama.cpp is imported or linked; it is a process whose JSON
is read. Its settings are its defaults, so this is what its users get.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfbyte.errors import PeerError, UsageError
from halfbyte.gates import cache_folder
from halfbyte.lab import environment
from halfbyte.lab.child import output_of, run_child
from halfbyte.lab.machine import cores
from halfbyte.lab.measure.engine_timing import TimedWork

VERSION = "0.3.36"  # of llama-cpp-python: the newest when docs/LOG.md's figures were taken
PROGRAMS = ("llama-bench", "llama-server")
# Static, so that the program can be moved out of its build folder.
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=ON",
)  # fmt: skip
Progress = Callable[[str], None]


def built(version: str = VERSION) -> Path:
    """Where the programs of a version are kept, made or not."""
    processor = f"{environment.cpu_name()} {_flags()}"
    return cache_folder("peers") / f"llama.cpp-{version}-{hashlib.sha256(processor.encode()).hexdigest()[:8]}"


def _flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def build(version: str = VERSION, progress: Progress = lambda _: None) -> Path:
    """The folder with the programs; they are built if it is not there."""
    folder = built(version)
    if all((folder / name).is_file() for name in PROGRAMS):
        return folder
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise UsageError(f"building llama.cpp needs {tool}; install it, or leave the comparison out.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".llama.cpp-") as scratch:
        work = Path(scratch)
        progress(f"fetching llama-cpp-python {version}")
        source = _unpacked(_download(version, work), work)
        progress("building llama.cpp (minutes)")
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        _run(["cmake", "-S", str(source), "-B", str(work / "build"), *generator, *OPTIONS], work)
        jobs = str(cores())
        _run(["cmake", "--build", str(work / "build"), "-j", jobs, "--target", *PROGRAMS], work)
        ready = work / "ready"
        ready.mkdir()
        for name in PROGRAMS:
            shutil.move(work / "build" / "bin" / name, ready / name)
        shutil.rmtree(folder, ignore_errors=True)
        ready.rename(folder)
    return folder


def _download(version: str, folder: Path) -> Path:
    name = "llama-cpp-python"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", name, "-d", str(folder)]
    _run([*pip, f"{name}=={version}"], folder)
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def _unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))


def _run(command: Sequence[str], folder: Path) -> None:
    log = folder / "log"
    with log.open("w", encoding="utf-8") as file:
        code = run_child(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace")[-600:].strip()
        raise PeerError(f"`{' '.join(map(str, command[:4]))} …` ended with {code}: {tail}")


# ---- llama-bench ---------------------------------------------------------------------------------------------------


def bench_command(folder: Path, file: Path, works: Sequence[TimedWork], threads: int, repeats: int) -> list[list[str]]:
    """One command for each depth: llama-bench crosses everything with everything."""
    commands = []
    for depth in sorted({w.depth for w in works}):
        here = [w for w in works if w.depth == depth]
        prompts, tokens = _list(w.prompt for w in here), _list(w.tokens for w in here)
        command = [
            str(folder / "llama-bench"),
            "-m",
            str(file),
            "-t",
            str(threads),
            "-r",
            str(repeats),
            "-d",
            str(depth),
        ]
        commands.append([*command, "-p", prompts, "-n", tokens, "-o", "json"])
    return commands


def _list(counts: Any) -> str:
    return ",".join(str(n) for n in sorted({*counts} - {0})) or "0"


def read_bench(text: str) -> dict[TimedWork, list[float]]:
    """llama-bench's JSON: tokens per second of every run, by what was run."""
    try:
        rows = json.loads(text)
        return {
            TimedWork(int(r["n_prompt"]), int(r["n_gen"]), int(r["n_depth"])): [float(s) for s in r["samples_ts"]]
            for r in rows
        }
    except (ValueError, KeyError, TypeError) as e:
        raise PeerError(f"llama-bench said something else than its JSON ({e}): {text[:200]!r}") from None


def measure(
    folder: Path, file: Path, works: Sequence[TimedWork], threads: int, repeats: int
) -> dict[TimedWork, list[float]]:
    """Every work in turn, each process for itself."""
    speeds: dict[TimedWork, list[float]] = {}
    for command in bench_command(folder, file, works, threads, repeats):
        speeds |= read_bench(output_of(command))
    return speeds
