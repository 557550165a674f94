"""The rehearsal of another GPU: what its memory is slowed down to, and that the slow memory is compiled in."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bench.checks import decode_case
from bench.experiments import rehearsal
from halfbyte.kernels.launch import build_program, nvrtc_available
from halfbyte.lab.predict import formats_of
from halfbyte.model.config import NAMED
from halfbyte.roofline import GPUS, decode_traffic

GB10, C = GPUS["gb10"], NAMED["120b"]


def values(options: tuple[str, ...]) -> dict[str, int]:
    return {name: int(value) for name, value in (o.removeprefix("-DHB_").split("=") for o in options)}


def test_the_queue_takes_as_long_as_that_memory() -> None:
    """All that a step streams, through a queue of this pace, takes what all of its bytes take at that bandwidth."""
    traffic = decode_traffic(C, formats_of("mxfp4"), 2048)
    streamed = (
        traffic.experts + traffic.attention + traffic.lm_head + traffic.kv + 36 * 128 * 2880 * 2
    )  # and the router
    assert 0.999 < streamed / traffic.total < 1
    for share in (1.0, 0.85):
        found = values(rehearsal.pace(GB10, 48, C, "mxfp4", 2048, share))
        seconds = streamed / 2**20 * found["PACE"] / 1024 * 1e-9
        assert seconds == pytest.approx(traffic.total / (232e9 * share), rel=1e-4)
    assert found["L2"] * 1e-9 / 2**20 == pytest.approx(48 / 1e12, rel=1e-4)  # seconds a byte, of one block
    assert found["KEPT"] * 1e-9 * 232e9 * 0.85 == pytest.approx(12e6, rel=1e-4)  # bytes read meanwhile: half of L2


def test_a_slice_has_its_part_of_memory_and_cache() -> None:
    whole, part = (values(rehearsal.pace(GB10, blocks, C, "mxfp4", 2048, 1.0)) for blocks in (48, 12))
    assert part["PACE"] == pytest.approx(4 * whole["PACE"], rel=1e-5)
    assert part["L2"] == whole["L2"]
    assert part["KEPT"] == whole["KEPT"]


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
def test_every_copy_goes_through_the_queue() -> None:
    pytest.importorskip("triton")
    from halfbyte.kernels.machine_code import disassemble

    shape = replace(decode_case.shape_of("120b", "mxfp4", shared=101_376), layers=2)
    sass = {}
    for name, paced in (("plain", ()), ("paced", rehearsal.pace(GB10, 48, C, "mxfp4", 2048, 1.0))):
        sass[name] = disassemble(build_program(rehearsal.with_pace(shape.program(), paced), "sm_90a")[0])
    copies = len(re.findall(r"\bUBLKCP", sass["plain"]))
    assert copies == len(re.findall(r"\bUBLKCP", sass["paced"])) > 4
    assert "ATOMG.E.EXCH.64" not in sass["plain"]
    assert len(re.findall(r"\bATOMG\.E\.ADD\.64", sass["paced"])) == copies
    assert sass["paced"].count("SR_GLOBALTIMER") >= 2 * copies
