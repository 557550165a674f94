"""The grouped products, compiled for sm_90a without a GPU: no spills, no serialised products, within shared memory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.prefill.builds import FP8_TILE, TILES, GroupedShape, rows_build
from halfbyte.kernels.cuda.prefill.products import Dense
from tests.kernels.cuda.machine_code import report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
]
BF16 = [tile for tile in TILES if tile != FP8_TILE]  # bf16 activations
EXPERTS = [GroupedShape("mxfp4", tile, swiglu) for tile in BF16 for swiglu in (False, True)]
DENSE = [GroupedShape(form, tile, False) for form in ("q8", "bf16") for tile in Dense.tiles]
ROPE = [GroupedShape(form, "m256n128", False, rope=True) for form in ("mxfp4", "q8", "bf16")]
FP8 = [GroupedShape("mxfp4", FP8_TILE, swiglu) for swiglu in (False, True)] + [
    GroupedShape("mxfp4", FP8_TILE, False, rope=True)
]


@pytest.mark.parametrize("shape", [*EXPERTS, *DENSE, *ROPE, *FP8], ids=str)
def test_products_stay_asynchronous_and_in_registers(shape: GroupedShape, tmp_path: Path) -> None:
    log = report(shape.program(), tmp_path)
    assert "serialized" not in log, log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert registers * shape.threads <= 65536
    assert shape.shared_bytes <= 232_448


def test_kernels_around_them(tmp_path: Path) -> None:
    log = report(rows_build("pack_rows").program, tmp_path)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
