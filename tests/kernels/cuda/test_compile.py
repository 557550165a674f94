"""The decode step compiles for every architecture it claims, without a GPU, and the machine code is what was meant."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from halfbyte.kernels.cuda.step import StepShape
from halfbyte.kernels.launch import Program, compile_program, nvrtc_available

LARGE, SMALL = 232_448, 101_376  # shared memory of a block: data centre, and everything that is sm_12x
reason = nvrtc_available()
needs_nvrtc = pytest.mark.skipif(reason is not None, reason=reason or "")


def shape(rows: int = 1, format: str = "mxfp4", shared: int = LARGE) -> StepShape:
    return StepShape(2880, 2880, 36, 128, 64, 8, 201088, rows=rows, qkv=format, o=format, lm_head=format, shared=shared)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_fits_on_sm12x(rows: int) -> None:
    s = shape(rows, shared=SMALL)
    assert s.refuse() is None
    assert s.slots >= 6
    assert s.shared_bytes <= SMALL


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "rows", "format"),
    [
        ("sm_90a", 1, "mxfp4"),
        ("sm_121a", 1, "mxfp4"),
        pytest.param("sm_100a", 1, "mxfp4", marks=pytest.mark.slow),
        pytest.param("sm_120a", 1, "mxfp4", marks=pytest.mark.slow),
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
    from halfbyte.kernels.prove import disassemble

    sass = disassemble(cubin)
    assert "HMMA.16816.F32.BF16" in sass
    assert "UBLKCP" in sass  # bulk copies, not loads through registers
    # x of 2880 values in 24 registers a lane: nothing of a matrix product may live in local memory
    assert len(re.findall(r"\b(?:STL|LDL)", sass)) < 40


def test_the_hash_follows_includes_and_nothing_else(tmp_path: Path) -> None:
    source = StepShape(2880, 2880, 36, 128, 64, 8, 201088).program().source
    for path in Program(source, "decode_step").files():
        shutil.copy(path, tmp_path / path.name)
    copy = Program(tmp_path / source.name, "decode_step")
    assert {p.name for p in copy.files()} == {p.name for p in Program(source, "decode_step").files()}
    before = copy.hash()
    (tmp_path / "unrelated.cuh").write_text("int x;", encoding="utf-8")
    assert copy.hash() == before
    (tmp_path / "ring.cuh").write_text((tmp_path / "ring.cuh").read_text() + "\n", encoding="utf-8")
    assert copy.hash() != before
