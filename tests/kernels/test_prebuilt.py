"""Cubins made ahead: found by their sources and options, and loaded where there is no compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.errors import PlanError
from halfbyte.gates import PRESETS
from halfbyte.kernels import launch
from halfbyte.kernels.cuda.sampling.sampler import BUILDS
from halfbyte.kernels.launch import compile_program, find_prebuilt, nvrtc_available
from halfbyte.kernels.prebuilt import prebuild, programs_of
from halfbyte.kernels.self_test import LATE
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.plan.phase import ARCHES

needs_nvrtc = pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")


def test_every_architecture_has_programs_of_its_own() -> None:
    for name in ("sm80", "sm86", "sm89", "sm90", "sm120", "sm121"):
        choice = choose(NAMED["20b"], PRESETS["fast"].gates, ARCHES[name])
        spec, chosen = choice.spec, choice.chosen
        programs = programs_of([(spec, chosen, ARCHES[name])])
        assert {target for _, target in programs} == {ARCHES[name].target}
        assert {"step.cu", "sample.cu", "product.cu"} <= {program.source.name for program, _ in programs}
        assert {p.entry for p, _ in programs if f"-DHB_DELAYS={LATE}" in p.options} == {"decode_step", "batch_experts"}


@needs_nvrtc
def test_what_was_made_ahead_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    program = BUILDS["sample_argmax"].program
    told: list[int] = []
    (path,) = prebuild([(program, "sm_121a")], tmp_path / "prebuilt", lambda name, done, of: told.append(done))
    assert told == [1]
    assert find_prebuilt(program, "sm_121a") == path

    def no_compiler() -> None:
        raise PlanError("there is no compiler here.")

    monkeypatch.setattr(launch, "_nvrtc", no_compiler)
    assert compile_program(program, "sm_121a") == path.read_bytes()
    other = replace(program, options=("-DOTHER",))
    assert find_prebuilt(other, "sm_121a") is None
    with pytest.raises(PlanError):
        compile_program(other, "sm_121a")
    with pytest.raises(PlanError):
        compile_program(program, "sm_90a")
