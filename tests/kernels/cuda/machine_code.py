"""What tests look for in machine code, and in ptxas' report."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from halfbyte.kernels.cuda.batch.builds import ProductShape
from halfbyte.kernels.launch import INCLUDES, Program


def report(program: Program, folder: Path) -> str:
    """What ptxas says about it."""
    target = ["-gencode", "arch=compute_90a,code=sm_90a", "--cubin", "-Xptxas", "-v"]
    command = [
        "nvcc",
        "-O3",
        "-std=c++17",
        *target,
        *program.options,
        f"-I{INCLUDES}",
        str(program.source),
        "-o",
        str(folder / "out.cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return done.stderr


def products_with_weights(sass: str, shape: ProductShape) -> list[list[str]]:
    """The machine code from the first to the last of each loop; experts have two, for up to four columns and for more.

    The router's products, which are stored one by one, stand apart."""
    lines = sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    count, ways = 4 * shape.workers[1], 1 + shape.ids
    assert len(products) == ways * count + shape.router // 8
    cut = shape.router // 8 if any("STG" in line for line in lines[products[0] : products[count - 1]]) else 0
    firsts = [cut + way * count for way in range(ways)]
    return [lines[products[first] : products[first + count - 1]] for first in firsts]


def freed_too_early(
    sass: str, loads: str = r"LDS\.128", arrivals: str = r"\.ART0", slot_bytes: int = 1 << 30
) -> list[str]:
    """Arrivals that do not wait for wide loads from shared memory in front of them.

    A load has landed once something has read one of its registers. The loads of interest are the weights (LDS.128); an
    arrival of another kind (with the bytes of a copy: the feeding warp's) reads nothing. Tables lie behind the ring,
    further from the base of shared memory than any weight from the base of its slot.
    """
    waiting: dict[int, set[int]] = {}  # line of a load -> its registers
    early = []
    for i, line in enumerate(sass.splitlines()):
        m = re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", line)
        if m is None:
            continue
        op, operands = m[1], m[2].split(",")
        waiting = {j: r for j, r in waiting.items() if i - j < 200}  # further back it is another phase
        offset = re.search(r"\+0x([0-9a-f]+)\]", m[2])
        if re.match(loads, op) and (offset is None or int(offset[1], 16) < slot_bytes):
            first = int(re.findall(r"R(\d+)", operands[0])[0])
            waiting = {j: r for j, r in waiting.items() if not r & set(range(first, first + 4))}
            waiting[i] = set(range(first, first + 4))
            continue
        if op.startswith(("SYNCS.ARRIVE", "ATOMS.ARRIVE")) and re.search(arrivals, op) and waiting:
            early.append(line.strip())
        sources = operands if op.startswith(("ST", "RED")) else operands[1:]
        for place, operand in enumerate(sources):
            wide = (4 if place == 0 else 2) if re.match("[HQO]MMA", op) else 1
            for r in re.findall(r"\bR(\d+)\b", operand):
                read = set(range(int(r), int(r) + wide))
                waiting = {j: registers for j, registers in waiting.items() if not registers & read}
    return early
