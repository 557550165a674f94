"""What the CUDA kernels become where a block has 101,376 bytes of shared memory: sizes, and results in the emulator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from batch_emulator import Emulator
from grouped_emulator import build

from halfbyte import formats
from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, layouts
from halfbyte.kernels.cuda.batch import Matrix, ProductArgs, Variant
from halfbyte.plan.phase import ARCHES

SMALL = ARCHES["sm121"].shared_memory


@pytest.mark.parametrize("k", [2880, 4096])
@pytest.mark.parametrize("form", ["mxfp4", "q8"])
def test_a_batch_product_fits(form: str, k: int) -> None:
    v = Variant.within(SMALL, form, k)
    parts, slot = v.slots
    assert v.shared_bytes <= SMALL
    assert v.ring // (parts * slot) == (2 if form == "mxfp4" else 1)  # tiles
    assert Variant.within(232_448, form, k) == Variant(form, k)
    sizes = [build(v.program()).hb_batch_size(i) for i in range(3)]
    assert sizes == [ctypes.sizeof(ProductArgs), v.shared_bytes, v.threads]


def test_a_tile_that_does_not_fit_is_refused() -> None:
    w = DenseTiles.of(torch.zeros((16, 2880), dtype=torch.bfloat16))
    with pytest.raises(PlanError, match="does not fit in 101376 bytes"):
        Matrix(w, None, "qkv", shared=SMALL)


@pytest.mark.parametrize(("form", "k"), [("mxfp4", 2880), ("mxfp4", 4096), ("q8", 4096)])
def test_a_batch_product_with_the_small_ring(form: str, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    plain = formats.quantize(torch.randn((80, k), generator=g) / k**0.5, "q8" if form == "q8" else "mxfp4")
    matrix = Matrix(layouts.convert(plain, "tile16"), None, "o", shared=SMALL)
    x, out = torch.randn((11, k), generator=g).bfloat16(), torch.full((11, 80), float("nan"))
    matrix.run(Emulator(3), x, out, 11)
    want = x.double() @ formats.dequantize(plain, torch.float32).double().T
    assert float((out.double() - want).norm() / want.norm()) < 1e-6
