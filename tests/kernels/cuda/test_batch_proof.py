"""The batch kernels, compiled for sm_90a without a GPU: no spills, within shared memory, slots freed in time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_grouped_proof import report

from halfbyte.kernels.cuda.batch import RowShape, Variant
from halfbyte.kernels.cuda.batch_attention import AttentionShape
from halfbyte.kernels.launch import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
PRODUCTS = [Variant(form, k) for form in ("mxfp4", "q8", "bf16") for k in (2880, 4096)] + [Variant("mxfp4", 2880, True)]


def no_spills(program: Program, folder: Path) -> str:
    said = report(program, folder)
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
    return said


@pytest.mark.parametrize("variant", PRODUCTS, ids=str)
def test_products(variant: Variant, tmp_path: Path) -> None:
    said = no_spills(variant.program(), tmp_path)
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    assert registers * variant.threads <= 65536
    assert variant.shared_bytes <= 232_448
    from halfbyte.kernels.prove import disassemble

    # An arrival between a load from the ring and its product lets the copy engine overwrite what is being loaded.
    lines = disassemble((tmp_path / "out.cubin").read_bytes()).splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    loop = lines[products[0] : products[-1]]
    assert len(products) >= 12
    assert not [line for line in loop if "SYNCS.ARRIVE" in line]


@pytest.mark.parametrize("shape", [RowShape(2880, 128, 4), RowShape(2880, 32, 4)], ids=str)
def test_rows(shape: RowShape, tmp_path: Path) -> None:
    no_spills(shape.program("rows"), tmp_path)


def test_attention(tmp_path: Path) -> None:
    no_spills(AttentionShape(8, 8).program(), tmp_path)
