"""Machine code as tools read it: the disassembly of a binary, and what ptxas reports of registers and spills.

Needs the PyPI package `nvidia-cuda-nvdisasm` or a toolkit, and Triton's ptxas; no GPU. What is missing is an error that
says what to install.
"""

from __future__ import annotations

import collections
import functools
import re
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path

from halfbyte.errors import UsageError

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/", re.MULTILINE)
MMA = re.compile(r"\b([A-Z]+MMA(?:\.[A-Z0-9_]+)*)\b")


def matrix_instructions(sass: str) -> dict[str, int]:
    """The count of each matrix instruction, the most frequent first."""
    return dict(collections.Counter(MMA.findall(sass)).most_common())


def count_instructions(sass: str) -> int:
    return len(INSTRUCTION.findall(sass))


@functools.cache
def _nvdisasm() -> str:
    """The path of nvdisasm: PyPI's, else the toolkit's, else Triton's, whose older versions cannot read SM121."""
    import triton

    for folder in (*site.getsitepackages(), site.getusersitepackages(), *sys.path):
        for path in Path(folder).glob("nvidia/**/bin/nvdisasm"):
            return str(path)
    inside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    tool = shutil.which("nvdisasm") or (str(inside) if inside.exists() else None)
    if tool is None:
        raise UsageError("the disassembler is missing; pip install nvidia-cuda-nvdisasm.")
    return tool


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([_nvdisasm(), "-c", f.name], capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines()[-1:]
        raise UsageError(
            f"{_nvdisasm()} cannot read this machine code ({' '.join(message)}); pip install nvidia-cuda-nvdisasm."
        )
    return done.stdout


def resources(ptx: str, target: str) -> tuple[int, int]:
    """(registers, bytes spilled), as ptxas reports them."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newest = folder / "ptxas-blackwell"  # reads what Triton writes for every target; the other may be too old
    tool = newest if newest.exists() else folder / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        done = subprocess.run(
            [str(tool), "-v", f"--gpu-name={target}", f.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    return report_of(done.stderr)


def report_of(log: str, but: str = "") -> tuple[int, int]:
    """(registers, bytes spilled) from ptxas' report: the most of any kernel, and of all functions but those."""
    spills = re.findall(r"properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    counted = [int(a) + int(b) for name, a, b in spills if not (but and re.search(but, name))]
    return max(map(int, registers), default=0), sum(counted)
