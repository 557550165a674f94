"""The decode step compiles for every architecture it claims, without a GPU, and the machine code is what was meant."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.decode.shape import ROW_SIZES, StepShape
from halfbyte.kernels.launch import INCLUDES, Program, compile_program, nvrtc_available
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.machine_code import freed_too_early

LARGE, SMALL = 232_448, 101_376  # shared memory of a block: data centre, and everything that is sm_12x
reason = nvrtc_available()
needs_nvrtc = pytest.mark.skipif(reason is not None, reason=reason or "")


def shape(rows: int = 1, format: str = "mxfp4", shared: int = LARGE) -> StepShape:
    return StepShape(2880, 2880, 36, 128, 64, 8, 201088, rows=rows, qkv=format, o=format, lm_head=format, shared=shared)


@pytest.mark.parametrize("rows", [r for r in ROW_SIZES if r < 2 * ARCHES["sm121"].limits.decode])
def test_fits_on_sm12x(rows: int) -> None:
    s = shape(rows, shared=SMALL)
    assert s.refuse() is None
    assert s.slots >= 6
    assert s.shared_bytes <= SMALL


def test_eight_rows_need_a_larger_block() -> None:
    """More than a decode step ever has; attention's output of every row stays in shared memory until o has read it."""
    assert "ring of 6 slots" in str(shape(8, shared=SMALL).refuse())
    assert shape(8).refuse() is None


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "rows", "format"),
    [
        ("sm_90a", 1, "mxfp4"),
        ("sm_121a", 1, "mxfp4"),
        pytest.param("sm_100a", 1, "mxfp4", marks=pytest.mark.slow),
        pytest.param("sm_120a", 1, "mxfp4", marks=pytest.mark.slow),
        pytest.param("sm_121a", 4, "mxfp4", marks=pytest.mark.slow),
        pytest.param("sm_90a", 4, "q8", marks=pytest.mark.slow),
        pytest.param("sm_90a", 8, "bf16", marks=pytest.mark.slow),
    ],
)
def test_compiles(arch: str, rows: int, format: str, tmp_path: Path) -> None:
    s = shape(rows, format, SMALL if arch.startswith("sm_12") else LARGE)
    assert s.refuse() is None
    assert s.shared_bytes <= s.shared
    cubin = compile_program(s.program(), arch, cache=tmp_path)
    assert cubin[:4] == b"\x7fELF"
    assert compile_program(s.program(), arch, cache=tmp_path) == cubin
    assert len(list(tmp_path.iterdir())) == 1
    if arch != "sm_90a" or rows != 1:
        return
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    sass = disassemble(cubin)
    assert "HMMA.16816.F32.BF16" in sass
    assert "UBLKCP" in sass  # bulk copies, not loads through registers
    # x of 2880 values in 24 registers a lane: nothing of a matrix product may live in local memory
    assert len(re.findall(r"\b(?:STL|LDL)", sass)) < 40


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "rows", "format"),
    [
        ("sm_90a", 1, "bf16"),
        *(
            pytest.param(a, r, f, marks=pytest.mark.slow)
            for a in ("sm_90a", "sm_121a")
            for f in ("mxfp4", "q8", "bf16")
            for r in ROW_SIZES
            if shape(r, f, SMALL if a == "sm_121a" else LARGE).refuse() is None
        ),
    ],
)
def test_a_slot_is_freed_after_it_was_read(arch: str, rows: int, format: str, tmp_path: Path) -> None:
    """The emulator cannot show this: on a GPU an arrival overtakes loads, and the copy engine writes over them."""
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    s = shape(rows, format, SMALL if arch.startswith("sm_12") else LARGE)
    sass = disassemble(compile_program(s.program(), arch, cache=tmp_path))
    assert sass.count("SYNCS.ARRIVE") >= 10
    assert freed_too_early(sass, slot_bytes=s.slot_bytes) == []


@needs_nvrtc
def test_compiling_leaves_the_interpreter_alone(tmp_path: Path) -> None:
    """An empty log is one byte, NVRTC writes it in place, and Python shares its single bytes."""
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __global__ void one() {}', encoding="utf-8")
    assert compile_program(Program(source, "one"), "sm_90a", cache=tmp_path / "cache")[:4] == b"\x7fELF"
    assert [bytes([i])[0] for i in range(256)] == list(range(256))


def test_the_hash_follows_includes_and_nothing_else(tmp_path: Path) -> None:
    source = StepShape(2880, 2880, 36, 128, 64, 8, 201088).program().source
    for path in Program(source, "decode_step").files():
        target = tmp_path / path.relative_to(INCLUDES)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    copy = Program(tmp_path / "decode" / source.name, "decode_step", root=tmp_path)
    assert {p.name for p in copy.files()} == {p.name for p in Program(source, "decode_step").files()}
    before = copy.hash()
    (tmp_path / "unrelated.cuh").write_text("int x;", encoding="utf-8")
    assert copy.hash() == before
    ring = tmp_path / "decode" / "ring.cuh"
    ring.write_text(ring.read_text() + "\n", encoding="utf-8")
    assert copy.hash() != before
