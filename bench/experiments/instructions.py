"""What instructions cost beside each other: cycles of a scheduler for mixtures like those of the decode loop.

    python -m bench.experiments.instructions --out receipt.json

A warp that widens MXFP4 and multiplies it issues seven instructions of integer logic and one for the tensor cores, 16
times for its part of a tile. Every mixture runs on registers alone, with one to four warps a scheduler; the figure is
cycles of a scheduler per warp and 16 groups.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from pathlib import Path

import torch

from bench.kernels import runner
from halfbyte.kernels.launch import Kernel, Program, build_program
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result

SOURCE = Path(__file__).resolve().parent / "instructions.cu"
GROUPS, TIMES = 16, 500
# of one group: how many of what, in this order
MIXTURES: dict[str, dict[str, int]] = {
    "16 HMMA": {"HMMA": 1},
    "112 LOP3": {"LOP3": 7},
    "112 SHF": {"SHF": 7},
    "112 PRMT": {"PRMT": 7},
    "112 IMAD": {"IMAD": 7},
    "112 FFMA": {"FFMA": 7},
    "16 HMMA + 112 LOP3": {"LOP3": 7, "HMMA": 1},
    "16 HMMA + 80 LOP3": {"LOP3": 5, "HMMA": 1},
    "16 HMMA + 80 LOP3 + 32 IMAD": {"LOP3": 5, "IMAD": 2, "HMMA": 1},
    "16 HMMA + 112 IMAD": {"IMAD": 7, "HMMA": 1},
    "16 HMMA + 112 FFMA": {"FFMA": 7, "HMMA": 1},
    "80 LOP3 + 80 FFMA": {"LOP3": 5, "FFMA": 5},
    # the weights of 32 HMMA, if they were widened to bytes; sparse: signs in the choice of two in four
    "16 IMMA": {"IMMA": 1},
    "16 IMMA + 112 LOP3": {"LOP3": 7, "IMMA": 1},
    "16 sparse IMMA": {"SPARSE_IMMA": 1},
    "16 sparse IMMA + 112 LOP3": {"LOP3": 7, "SPARSE_IMMA": 1},
}


class Arguments(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("clocks", ctypes.c_void_p), ("times", ctypes.c_int)]


def program(mixture: dict[str, int]) -> Program:
    parts = [f"{name}(g*{n}+{i})" for name, n in mixture.items() for i in range(n)]
    return Program(SOURCE, "instructions", (f"-DHB_GROUPS={GROUPS}", f"-DHB_GROUP={' '.join(parts)}"))


def measure(cell: Cell, mixture: dict[str, int], warps: list[int]) -> Result:
    """Cycles have no place among the schema's units, so they are details."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    memory = torch.randint(0, 2**31, (1024 + blocks * 512,), dtype=torch.int32, device="cuda")
    clocks = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    kernel = Kernel(build_program(program(mixture), runner.device_arch())[0], "instructions", 0)
    cycles = {}
    for count in warps:
        for _ in range(2):
            kernel.launch(blocks, count * 32, Arguments(memory.data_ptr(), clocks.data_ptr(), TIMES))
        torch.cuda.synchronize()
        cycles[f"{count} warps"] = float(clocks.double().mean()) / TIMES / (count / 4)
    print({name: round(c, 1) for name, c in cycles.items()}, flush=True)
    return Result(cell, detail={"cycles": cycles, "groups": GROUPS})


def main() -> int:
    parser = runner.arguments(__doc__)
    parser.add_argument("--warps", type=runner.numbers, default=[4, 8, 12, 16])
    args = runner.begin(parser)
    receipt = runner.Receipt("bench/experiments/instructions.py", args.out, receipts.hashes([SOURCE]))
    for name, mixture in MIXTURES.items():
        cell = Cell("experiment", path="instructions", shape={"case": name})
        receipt.measure(cell, partial(measure, cell, mixture, args.warps))
    return receipt.end()


if __name__ == "__main__":
    sys.exit(main())
