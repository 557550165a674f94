"""The grouped products, compiled for sm_90a without a GPU: no spills, no serialised products, within shared memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.prefill.builds import ROWS_PROGRAM, SHAPES, Variant
from halfbyte.kernels.launch import INCLUDES, Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
BF16 = [shape for shape in SHAPES if shape != "vast"]  # bf16 activations
EXPERTS = [Variant("mxfp4", shape, swiglu) for shape in BF16 for swiglu in (False, True)]
DENSE = [Variant(form, shape, False) for form in ("q8", "bf16") for shape in ("narrow", "wide")]  # as `Dense` takes
ROPE = [Variant(form, "wide", False, rope=True) for form in ("mxfp4", "q8", "bf16")]
FP8 = [Variant("mxfp4", "vast", swiglu) for swiglu in (False, True)] + [Variant("mxfp4", "vast", False, rope=True)]


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


@pytest.mark.parametrize("variant", [*EXPERTS, *DENSE, *ROPE, *FP8], ids=str)
def test_products_stay_asynchronous_and_in_registers(variant: Variant, tmp_path: Path) -> None:
    said = report(variant.program(), tmp_path)
    assert "serialized" not in said, said
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    assert registers * variant.threads <= 65536
    assert variant.shared_bytes <= 232_448


def test_kernels_around_them(tmp_path: Path) -> None:
    said = report(Program(ROWS_PROGRAM, "rows"), tmp_path)
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
