"""The batch kernels, compiled for sm_90a without a GPU: no spills, within shared memory, slots freed in time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.attention.batch import AttentionShape
from halfbyte.kernels.cuda.batch.builds import ProductShape, RowShape
from halfbyte.kernels.launch import Program
from tests.kernels.cuda.machine_code import products_with_weights, report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
PRODUCTS = [ProductShape(form, k) for form in ("mxfp4", "q8", "bf16") for k in (2880, 4096)] + [
    ProductShape("mxfp4", 2880, ids=True),
    ProductShape("mxfp4", 2880, True, ids=True),
    ProductShape("mxfp4", 2880, True, ids=True, both=True),
    *(ProductShape(form, 4096, router=experts) for form in ("mxfp4", "q8", "bf16") for experts in (32, 128)),
]


def no_spills(program: Program, folder: Path) -> str:
    log = report(program, folder)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
    return log


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(shape: ProductShape, tmp_path: Path) -> None:
    log = no_spills(shape.program(), tmp_path)
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert registers * shape.threads <= 65536
    assert shape.shared_bytes <= 232_448
    from halfbyte.kernels.machine_code import disassemble

    # An arrival between a load from the ring and its product lets the copy engine overwrite what is being loaded.
    for loop in products_with_weights(disassemble((tmp_path / "out.cubin").read_bytes()), shape):
        assert not [line for line in loop if "SYNCS.ARRIVE" in line or "STG" in line]


@pytest.mark.parametrize("shape", [RowShape(2880, 128, 4), RowShape(2880, 32, 4)], ids=str)
def test_rows(shape: RowShape, tmp_path: Path) -> None:
    no_spills(shape.program("rows"), tmp_path)


def test_attention(tmp_path: Path) -> None:
    no_spills(AttentionShape(8, 8).program(), tmp_path)
