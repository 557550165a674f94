"""What instructions cost beside each other: cycles of a scheduler for mixtures like those of the decode loop.

    python -m bench.experiments.instructions --out receipt.json

A warp that widens MXFP4 and multiplies it issues seven instructions of integer logic and one for the tensor cores, 16
times for its part of a tile. Every mixture runs on registers alone, with one to four warps a scheduler; the figure is
cycles of a scheduler per warp and 16 groups. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.kernels.launch import Kernel, Program, build_program
from halfbyte.lab import environment, receipts

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warps", type=lambda t: [int(n) for n in t.split(",")], default=[4, 8, 12, 16])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    target = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    memory = torch.randint(0, 2**31, (1024 + blocks * 512,), dtype=torch.int32, device="cuda")
    clocks = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    result: dict[str, Any] = {
        "bench": "instructions", "schema": 1, "environment": environment.collect(),
        "measured": receipts.hashes([SOURCE]), "groups": GROUPS, "rows": [],
    }  # fmt: skip
    for name, mixture in MIXTURES.items():
        kernel = Kernel(build_program(program(mixture), target)[0], "instructions", 0)
        row: dict[str, Any] = {"mixture": name}
        for warps in args.warps:
            for _ in range(2):
                kernel.launch(blocks, warps * 32, Arguments(memory.data_ptr(), clocks.data_ptr(), TIMES))
            torch.cuda.synchronize()
            row[f"{warps} warps"] = float(clocks.double().mean()) / TIMES / (warps / 4)
        result["rows"].append(row)
        print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, default=str), encoding="utf-8")
    print(json.dumps(result, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
