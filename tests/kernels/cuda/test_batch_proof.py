"""The batch kernels, compiled for sm_90a without a GPU: no spills, within shared memory, slots freed in time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from test_grouped_proof import report

from halfbyte.kernels.cuda.attention.batch import AttentionShape
from halfbyte.kernels.cuda.batch.products import RowShape, Variant
from halfbyte.kernels.launch import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
PRODUCTS = [Variant(form, k) for form in ("mxfp4", "q8", "bf16") for k in (2880, 4096)] + [
    Variant("mxfp4", 2880, ids=True),
    Variant("mxfp4", 2880, True, ids=True),
    Variant("mxfp4", 2880, True, ids=True, both=True),
    *(Variant(form, 4096, router=experts) for form in ("mxfp4", "q8", "bf16") for experts in (32, 128)),
]


def no_spills(program: Program, folder: Path) -> str:
    said = report(program, folder)
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
    return said


def products_with_weights(sass: str, variant: Variant) -> list[list[str]]:
    """The machine code from the first to the last of each loop; experts have two, for up to four columns and for more.

    The router's products, which are stored one by one, stand apart."""
    lines = sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    count, ways = 4 * variant.workers[1], 1 + variant.ids
    assert len(products) == ways * count + variant.router // 8
    cut = variant.router // 8 if any("STG" in line for line in lines[products[0] : products[count - 1]]) else 0
    firsts = [cut + way * count for way in range(ways)]
    return [lines[products[first] : products[first + count - 1]] for first in firsts]


@pytest.mark.parametrize("variant", PRODUCTS, ids=str)
def test_products(variant: Variant, tmp_path: Path) -> None:
    said = no_spills(variant.program(), tmp_path)
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # type: ignore[index]
    assert registers * variant.threads <= 65536
    assert variant.shared_bytes <= 232_448
    from halfbyte.kernels.prove import disassemble

    # An arrival between a load from the ring and its product lets the copy engine overwrite what is being loaded.
    for loop in products_with_weights(disassemble((tmp_path / "out.cubin").read_bytes()), variant):
        assert not [line for line in loop if "SYNCS.ARRIVE" in line or "STG" in line]


@pytest.mark.parametrize("shape", [RowShape(2880, 128, 4), RowShape(2880, 32, 4)], ids=str)
def test_rows(shape: RowShape, tmp_path: Path) -> None:
    no_spills(shape.program("rows"), tmp_path)


def test_attention(tmp_path: Path) -> None:
    no_spills(AttentionShape(8, 8).program(), tmp_path)
