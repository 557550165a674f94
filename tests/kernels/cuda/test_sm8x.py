"""The CUDA kernels with SM80's instructions (HB_SM80): rings that all lanes of a feeding warp fill by cp.async.

In the emulator beside the reference, with copies that land as late as they may, so that a reader that does not wait for
them is wrong. Then their machine code for sm_80, sm_86 and sm_89. No such GPU has run them;
`HALFBYTE_GPU_INSTRUCTIONS=sm80` runs every test of this folder so (docs/add-an-architecture.md).
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.architectures import GPU_ARCHES
from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels import prove
from halfbyte.kernels.cuda.batch.builds import BatchProductArgs, ProductShape, product_build
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.decode.phase import shape_of
from halfbyte.kernels.cuda.decode.shape import StepArgs, StepShape, build_of
from halfbyte.kernels.cuda.device.host import INT, POINTER, KernelMachine, Workspace, fields, gpu
from halfbyte.kernels.cuda.phase import BULK_COPY, MMA_SYNC, TENSOR_COPY, UNIT_COPY, CudaPhase, promises
from halfbyte.kernels.cuda.prefill.builds import GroupedShape
from halfbyte.kernels.cuda.prefill.builds import build_of as grouped_build
from halfbyte.kernels.cuda.prefill.sync import SyncDense, SyncProductShape
from halfbyte.kernels.launch import SM80, Build, Program, compile_program, nvrtc_available
from tests.kernels.cuda.batch.test_products import check_layer, make_layer
from tests.kernels.cuda.decode.decode_models import LOOSE, TIGHT, Case, compare, small
from tests.kernels.cuda.emulator import Emulator, sizes
from tests.kernels.cuda.machine_code import freed_too_early
from tests.kernels.cuda.prefill import test_sync
from tests.kernels.cuda.prefill.test_sync import close, weights

OLD = [arch for arch in GPU_ARCHES.values() if arch.family == "sm8x"]
SHARED = GPU_ARCHES["sm86"].shared_memory
no_nvrtc = nvrtc_available()
needs_nvrtc = pytest.mark.skipif(no_nvrtc is not None, reason=no_nvrtc or "")


def old_shape(rows: int, **changes: object) -> StepShape:
    return replace(small(rows), units=True, shared=SHARED, **changes)  # type: ignore[arg-type]


def with_sm80(program: Program) -> Program:
    return replace(program, options=(SM80, *program.options))


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", OLD, ids=lambda arch: arch.name)
@pytest.mark.parametrize("dense", ["mxfp4", "q8", "bf16"])
def test_the_decode_step_fits(dense: str, arch: object) -> None:
    """Of one to four rows, with registers that its warps have: three to a scheduler for one row, two for more."""
    assert arch in OLD
    spec = prove.default_spec(dense=dense)
    for rows, warps in ((1, 10), (2, 8), (4, 8)):
        s = shape_of(spec, arch, rows)  # type: ignore[arg-type]
        assert s.units
        assert s.refuse() is None
        assert s.warps + 1 == warps
        assert s.shared_bytes <= arch.shared_memory  # type: ignore[attr-defined]
        assert s.slots >= (13 if arch.name == "sm80" else 7)  # type: ignore[attr-defined]


def test_a_block_of_sm80_has_a_deeper_ring() -> None:
    for form in ("mxfp4", "q8"):
        few, more = (ProductShape(form, 2880).within(GPU_ARCHES[name].shared_memory) for name in ("sm86", "sm80"))
        parts, slot = more.slots
        assert more.shared_bytes <= GPU_ARCHES["sm80"].shared_memory
        assert more.ring // (parts * slot) > few.ring // (parts * slot)
        assert few == ProductShape(form, 2880).within(GPU_ARCHES["sm121"].shared_memory)


# ---- in the emulator ------------------------------------------------------------------------------------------------


def test_one_row_of_the_decode_step() -> None:
    """A context of several parts; then the next position, whose key this step has written."""
    shape = old_shape(1, ring=8)
    got = sizes(with_sm80(shape.program()), 3)
    assert got[0] == ctypes.sizeof(StepArgs)
    assert got[2] == shape.threads
    assert shape.shared_bytes - 1024 < got[1] <= shape.shared_bytes
    case = Case(shape, Emulator(5, sm80=True), 1, 12)
    compare(case, [9], [650], [0], TIGHT)
    compare(case, [300], [651], [0], TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [("q8",) * 3, ("bf16",) * 3, ("q8", "mxfp4", "bf16")], ids="-".join)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_and_formats_of_the_decode_step(rows: int, formats: tuple[str, str, str]) -> None:
    shape = replace(small(rows, formats), units=True, shared=SHARED)
    for seed in range(2):
        case = Case(shape, Emulator(3 + seed, seed, sm80=True), 4, 12)
        compare(case, [9, 100, 200, 300][:rows], [650, 3, 131, 70][:rows], [0, 1, 2, 3][:rows], LOOSE)


@pytest.mark.slow
def test_an_fp8_cache_in_the_decode_step() -> None:
    case = Case(old_shape(2, kv="fp8"), Emulator(4, sm80=True), 2, 12)
    compare(case, [9, 100], [650, 70], [0, 1], 2e-2)


@pytest.mark.slow
@pytest.mark.exact
def test_the_same_bits_as_with_a_copy_engine() -> None:
    """Only the way of the bytes differs: bf16 differences and products by a multiply-add, E4M3 by integers."""
    for shape in (replace(old_shape(2), kv="bf16"), replace(old_shape(1), kv="fp8"), replace(old_shape(1), qkv="q8")):
        logits = []
        for sm80 in (False, True):
            case = Case(shape, Emulator(4, seed=int(sm80), sm80=sm80), 4, 12)
            case.run([9, 100][: shape.rows], [650, 3][: shape.rows], [0, 1][: shape.rows])
            logits.append(case.step.logits.clone())
        assert torch.equal(*logits)


def test_a_product_of_a_batch() -> None:
    w, dense = weights("mxfp4", (80, 192), 4)
    assert isinstance(w, MXTensor)
    x = torch.randn((11, 192), generator=torch.Generator().manual_seed(4)).bfloat16()
    out, tickets = torch.full((11, 80), float("nan")), torch.zeros(2, dtype=torch.int32)
    machine = Emulator(3, seed=1, sm80=True)
    BatchMatrix(w, None, "o", shared=SHARED).run(machine, x, out, 11, tickets=tickets.data_ptr(), early=False)
    close(out, x.double() @ dense.double().T, 1e-6)
    assert int(tickets[0]) > 3  # every block has drawn until there was nothing left


@pytest.mark.slow
def test_a_layer_of_a_batch() -> None:
    """qkv and o as streams, experts in one launch with tickets; more rows than a group has columns."""
    layer, w = make_layer(128, 128, 32, 4, "mxfp4", Emulator(3, seed=2, sm80=True))
    check_layer(layer, w, 11, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "k"), [("mxfp4", 2880), ("q8", 4096)])
def test_a_product_with_the_small_ring(form: str, k: int) -> None:
    shape = ProductShape(form, k).within(SHARED)
    got = sizes(with_sm80(shape.program()), 3)
    assert got == [ctypes.sizeof(BatchProductArgs), shape.shared_bytes, shape.threads]
    layer, w = make_layer(128, 128, 32, 4, form, Emulator(3, seed=5, sm80=True))
    check_layer(layer, w, 20, 0.0)


def test_grouped_products() -> None:
    workspace = Workspace(Emulator(5, sm80=True), {}, torch.device("cpu"))
    w, dense = weights("mxfp4", (192, 192), 3)
    x = torch.randn((70, 192), generator=torch.Generator().manual_seed(3))
    close(SyncDense(workspace, w, None, "o", "64x128").run(x), x.bfloat16().double() @ dense.double().T, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["64x128", "128x128"])
def test_grouped_experts(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the switch, as a whole run of these tests has it."""
    monkeypatch.setenv("HALFBYTE_GPU_INSTRUCTIONS", "sm80")
    test_sync.test_experts("bf16", 70, 5, 3, 192, 128, 0.5, tile)


def test_what_begins_with_sm90_is_refused() -> None:
    wgmma = grouped_build(GroupedShape("mxfp4", "m256n64", False))
    block_scaled = grouped_build(SyncProductShape("mxfp4", "64x128", False, "mxfp8"))
    for build in (wgmma, block_scaled):
        with pytest.raises(PlanError, match="no GPU before SM90 has"):
            Emulator(2, sm80=True).load(build)


# ---- copies, and what the emulator must see of them -----------------------------------------------------------------


class ProbeArgs(ctypes.Structure):
    _fields_ = [*fields(POINTER, "from", "to"), *fields(INT, "pieces", "fault")]


PROBE, SLOT, PAGE = Path(__file__).with_name("copies_probe.cu"), 1552, 1024


@functools.cache
def probe_build(entry: str) -> Build:
    return Build(entry, Program(PROBE, entry), 64, 3 * (SLOT + 16), early=False)


def copied(machine: KernelMachine, entry: str, fault: int = 0, device: str = "cpu") -> bool:
    """Whether all bytes have come through; the last page of `by_groups` has zeros."""
    each, pieces = (SLOT, 11) if entry == "through_a_ring" else (PAGE, 9)
    source = torch.randint(0, 256, (pieces, each), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source, to = source.to(device), torch.full((pieces + 1, each), 0xEE, dtype=torch.uint8, device=device)
    machine.run(probe_build(entry), 1, ProbeArgs(source.data_ptr(), to.data_ptr(), pieces, fault))
    last = 0xEE if entry == "through_a_ring" else 0
    return torch.equal(to[:pieces], source) and bool((to[pieces] == last).all())


@pytest.mark.parametrize("sm80", [True, False])
@pytest.mark.parametrize("entry", ["through_a_ring", "by_groups"])
def test_bytes_come_through(entry: str, sm80: bool) -> None:
    assert sizes(probe_build(entry).program, 2) == [ctypes.sizeof(ProbeArgs), 3 * (SLOT + 16)]
    assert all(copied(Emulator(1, seed, sm80=sm80), entry) for seed in range(20))


@pytest.mark.parametrize(
    ("entry", "fault", "sm80"),
    [
        ("through_a_ring", 1, True),
        ("through_a_ring", 2, True),
        ("through_a_ring", 2, False),
        ("through_a_ring", 3, True),
        ("by_groups", 4, True),
    ],
    ids=["an arrival that does not follow its copies", "a reader that does not wait", "the same of bulk copies",
         "a slot that is free too early", "a wait for a group too few"],
)  # fmt: skip
def test_data_is_not_there_before_it_was_waited_for(entry: str, fault: int, sm80: bool) -> None:
    """The emulator would be no judge if such a kernel passed."""
    assert not all(copied(Emulator(1, seed, sm80=sm80), entry, fault) for seed in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("entry", ["through_a_ring", "by_groups"])
def test_bytes_come_through_on_a_gpu(entry: str) -> None:
    """With the copy engine, or by lanes where HALFBYTE_GPU_INSTRUCTIONS says so."""
    assert all(copied(gpu(), entry, device="cuda") for _ in range(50))


# ---- machine code ---------------------------------------------------------------------------------------------------


def test_promises_follow_the_copy_engine() -> None:
    build = product_build(ProductShape("mxfp4", 2880))
    assert promises(build, GPU_ARCHES["sm90"]) == (build.need, build.ban)
    need, ban = promises(build, GPU_ARCHES["sm86"])
    assert need == (MMA_SYNC, UNIT_COPY)
    assert {BULK_COPY, TENSOR_COPY} <= set(ban.split("|"))
    step = grouped_build(SyncProductShape("mxfp4", "64x128", False))
    assert promises(step, GPU_ARCHES["sm80"])[0] == (MMA_SYNC, UNIT_COPY)  # once, though it has two kinds of copies


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param("sm86", "cuda.decode_step", marks=pytest.mark.slow),
        ("sm89", "cuda.grouped_sync_o"),
        ("sm80", "cuda.batch_layer_fused"),
    ],
)
def test_kernels_are_as_promised(arch: str, name: str) -> None:
    """Products of a warp, copies of sixteen bytes, neither a copy engine nor its barriers; `make test-full` has all."""
    pytest.importorskip("triton")
    spec, phase = prove.default_spec(dense="mxfp4"), prove.phase_named(name)
    assert isinstance(phase, CudaPhase)
    assert phase.refuse(spec, GPU_ARCHES[arch], Gates()) is None
    build = next(b for b in phase.builds(spec, GPU_ARCHES[arch]) if b.need)
    evidence = prove.prove_build(name, build, GPU_ARCHES[arch])
    assert evidence.ok, prove.show(evidence)
    assert evidence.target == f"sm_{arch[2:]}"
    assert evidence.instructions["HMMA.16816.F32.BF16"] > 8
    assert evidence.spilled_bytes == 0
    sass, _ = prove._built(replace(build.program, entry=""), evidence.target)
    assert len(re.findall(r"LDGSTS", sass)) >= 4
    assert "ARRIVES.LDGSTSBAR" in sass
    assert not re.search(r"\b(UBLKCP|UTMALDG|SYNCS|ACQBULK|PREEXIT)", sass)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", OLD, ids=lambda arch: arch.name)
@pytest.mark.parametrize("dense", ["mxfp4", "q8", "bf16"])
def test_a_slot_is_freed_after_it_was_read(dense: str, arch: object, tmp_path: Path) -> None:
    """An arrival takes its address from a zero that is made of the loads: see `bar_arrive` in instructions.cuh."""
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    assert arch in OLD
    target, shared = arch.target, arch.shared_memory  # type: ignore[attr-defined]
    step = StepShape(2880, 2880, 36, 128, 64, 8, 201088, qkv=dense, o=dense, lm_head=dense, shared=shared, units=True)
    sass = disassemble(compile_program(build_of(step).program, target, cache=tmp_path))
    assert sass.count("ATOMS.ARRIVE") > 10
    assert freed_too_early(sass, arrivals="ATOMS", slot_bytes=step.slot_bytes) == []
    for tile in ("64x128", "128x128"):
        product = SyncProductShape(dense, tile, False)
        sass = disassemble(compile_program(product.program(), target, cache=tmp_path))
        assert sass.count("ATOMS.ARRIVE") > product.columns // 16
        assert freed_too_early(sass, r"LDS\.128|LDSM", "ATOMS") == []
