"""What the CUDA kernels become where a block has 101,376 bytes of shared memory: sizes, and results in the emulator."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from halfbyte import formats
from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, layouts
from halfbyte.gates import PRESETS, Gates, Layers
from halfbyte.kernels.cuda.batch.builds import BatchProductArgs, ProductShape
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncProductShape
from halfbyte.kernels.launch import Program, _for_arch, compile_program, nvrtc_available
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.decode.decode_models import Case, compare
from tests.kernels.cuda.emulator import Emulator, sizes
from tests.kernels.cuda.machine_code import freed_too_early, products_with_weights

SMALL = ARCHES["sm121"].shared_memory


@pytest.mark.parametrize("k", [2880, 4096])
@pytest.mark.parametrize("form", ["mxfp4", "q8"])
def test_a_batch_product_fits(form: str, k: int) -> None:
    v = ProductShape(form, k).within(SMALL)
    parts, slot = v.slots
    assert v.shared_bytes <= SMALL
    assert v.ring // (parts * slot) == (2 if form == "mxfp4" else 1)  # tiles
    assert ProductShape(form, k).within(232_448) == ProductShape(form, k)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dense", ["mxfp4", "q8", "bf16"])
def test_the_decode_step_leaves_registers_to_its_warps(dense: str, rows: int) -> None:
    """A scheduler has 512 registers a lane: with more than three warps 128 of a thread, too few on SM12x (no spills in
    test_proof.py)."""
    s = StepShape(2880, 2880, 36, 128, 64, 8, 201088, rows=rows, qkv=dense, o=dense, lm_head=dense, shared=SMALL)
    assert s.refuse() is None
    assert s.warps + 1 <= 12
    assert s.slots >= 6
    assert s.shared_bytes <= SMALL


def test_lm_head_of_a_batch() -> None:
    """As a stream where its tile fits in 99 KB, else through the grouped product; on SM90 as it was."""
    for dense, head in (("mxfp4", "batch_sync"), ("q8", "batch_sync"), ("checkpoint", "grouped_sync")):
        gates = Gates(layers=Layers("mxfp4", dense, dense, dense))
        for arch in ("sm120", "sm121"):
            found = choose(NAMED["120b"], gates, ARCHES[arch]).selection
            assert found.chosen["batch"][-1] == f"cuda.{head}_norm_lm_head"
            assert found.chosen["prefill"][-1] == "cuda.grouped_sync_norm_lm_head"
        found = choose(NAMED["120b"], gates, ARCHES["sm90"]).selection
        assert found.chosen["batch"][-1] == "cuda.batch_norm_lm_head"
    said = {
        r.phase: r.reason
        for r in choose(NAMED["120b"], PRESETS["exact"].gates, ARCHES["sm121"]).selection.refusals
        if r.regime == "batch"
    }
    assert "tile of lm_head in bf16" in said["cuda.batch_sync_norm_lm_head"]
    assert "sm121 has 101376" in said["cuda.batch_sync_norm_lm_head"]


def test_a_tile_that_does_not_fit_is_refused() -> None:
    w = DenseTiles.of(torch.zeros((16, 2880), dtype=torch.bfloat16), "tile16")
    with pytest.raises(PlanError, match="does not fit in 101376 bytes"):
        BatchMatrix(w, None, "qkv", shared=SMALL)


@pytest.mark.parametrize(
    ("form", "k"), [("mxfp4", 2880), ("q8", 4096), pytest.param("mxfp4", 4096, marks=pytest.mark.slow)]
)
def test_a_batch_product_with_the_small_ring(form: str, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    plain = formats.quantize(torch.randn((80, k), generator=g) / k**0.5, "q8" if form == "q8" else "mxfp4")
    matrix = BatchMatrix(layouts.convert(plain, "tile16"), None, "o", shared=SMALL)
    x, out = torch.randn((11, k), generator=g).bfloat16(), torch.full((11, 80), float("nan"))
    shape = matrix.shape
    assert sizes(shape.program(), 3) == [ctypes.sizeof(BatchProductArgs), shape.shared_bytes, shape.threads]
    matrix.run(Emulator(3), x, out, 11)
    want = x.double() @ formats.dequantize(plain, torch.float32).double().T
    assert float((out.double() - want).norm() / want.norm()) < 1e-6


def test_one_row_whose_tiles_come_in_pieces() -> None:
    """A ring too small for a tile of o in q8 (64 chunks): each warp takes a chunk of each piece, and four groups of k
    share an accumulator, so that every other piece has its scales in the other lanes."""
    shape = StepShape(192, 128, 2, 32, 64, 8, 512, qkv="q8", o="q8", lm_head="q8", shared=SMALL, ring=6)
    case = Case(shape, Emulator(4), 1, 4)
    compare(case, [17], [100], [0], 5e-4)


# ---- machine code ---------------------------------------------------------------------------------------------------

BATCH = [
    v.within(SMALL)
    for v in (
        ProductShape("mxfp4", 2880),
        ProductShape("mxfp4", 2880, True, ids=True, both=True),
        ProductShape("mxfp4", 4096, router=128),
        ProductShape("q8", 2880),
        ProductShape("q8", 4096, router=128),
    )
]
SYNC = [SyncProductShape("mxfp4", "64x128", False), SyncProductShape("mxfp4", "64x128", False, "mxfp8")]
MORE = [SyncProductShape(f, t, s) for f in ("mxfp4", "q8", "bf16") for t in COLUMNS for s in (False, True)]
MORE += [SyncProductShape("mxfp4", t, s, mx) for mx in ("mxfp8", "mxfp4") for t in COLUMNS for s in (False, True)]
no_nvrtc = nvrtc_available()
needs_nvrtc = pytest.mark.skipif(no_nvrtc is not None, reason=no_nvrtc or "")


def disassembled(program: Program, arch: str, folder: Path) -> str:
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    return disassemble(compile_program(program, arch, cache=folder))


def test_copies_name_the_memory_of_their_block() -> None:
    """Else the compiler calls the driver around each of them; `prove` looks for that call in the machine code."""
    one, both = (b'"cp.async.bulk.shared::cluster.global.' + end for end in (b'mbarrier"', b'multicast::cluster"'))
    for arch in ("sm_120a", "sm_121a"):
        assert _for_arch(one + b"\n" + both, arch) == one.replace(b"cluster", b"cta") + b"\n" + both
    assert _for_arch(one, "sm_90a") == one


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_121a", pytest.param("sm_120a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("v", [*SYNC, *(pytest.param(v, marks=pytest.mark.slow) for v in MORE)], ids=str)
def test_a_stage_is_freed_after_it_was_read(v: SyncProductShape, arch: str, tmp_path: Path) -> None:
    """ptxas moves an arrival in front of products, volatile or not: see `release` in grouped_sync.cu."""
    sass = disassembled(v.program(), arch, tmp_path)
    assert sass.count("SYNCS.ARRIVE") > v.columns // 16
    assert sass.count("LDSM") > v.columns // 16
    assert freed_too_early(sass, r"LDS\.128|LDSM", r"\.A[1R]T0") == []


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
@pytest.mark.parametrize("v", BATCH, ids=str)
def test_a_batch_slot_is_freed_after_it_was_read(v: ProductShape, arch: str, tmp_path: Path) -> None:
    """As batch/test_machine_code.py has it for sm_90a: no arrival between a load from the ring and its product."""
    for loop in products_with_weights(disassembled(v.program(), arch, tmp_path), v):
        assert not [line for line in loop if "SYNCS.ARRIVE" in line]
