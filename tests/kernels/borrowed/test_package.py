"""Packages that kernels are borrowed from: asked about on the machine that would run them, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest

from halfbyte.gates import PRESETS, Gates
from halfbyte.kernels.borrowed import package
from halfbyte.kernels.borrowed.package import FLASHINFER, VLLM
from halfbyte.kernels.prove import default_spec
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.select import select


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(package, "is_here", lambda arch: arch.name == "sm90")


def test_what_is_missing_unknown_or_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert "pip install vllm" in str(VLLM.refuse(ARCHES["sm90"]))
    assert "pip install flashinfer-python" in str(FLASHINFER.refuse(ARCHES["sm90"]))
    assert VLLM.refuse(ARCHES["sm121"]) is None  # another machine: nobody knows what is there
    installed(monkeypatch, {"vllm": "0.32.0+cpu"})
    assert "with its CUDA kernels" in str(VLLM.refuse(ARCHES["sm90"]))
    installed(monkeypatch, {"vllm": "0.27.1", "flashinfer-python": "0.6.14"})
    assert VLLM.refuse(ARCHES["sm90"]) == "supports vLLM 0.26 and 0.32, not 0.27.1"
    assert FLASHINFER.refuse(ARCHES["sm90"]) is None
    for version in ("0.6.18.post1", "0.7.0.post1"):
        installed(monkeypatch, {"flashinfer-python": version})
        assert FLASHINFER.refuse(ARCHES["sm90"]) is None
    installed(monkeypatch, {"flashinfer-python": "0.6.9"})  # has no layout of weights for the mixed product
    assert FLASHINFER.refuse(ARCHES["sm90"]) == "supports FlashInfer 0.6.14 and 0.6.18 and 0.7, not 0.6.9"


def test_presets_of_the_comparison_in_our_own_engine() -> None:
    """Marlin, and CUTLASS with mxfp8, as a GB10 would take them; an H200 has no block-scaled product."""
    for preset, kernel in (("baseline", "borrowed.marlin_moe"), *((p, "borrowed.cutlass_moe") for p in "abcde")):
        gates = PRESETS[preset].gates
        spec = replace(default_spec(), activation=gates.activation)
        chosen, _ = select(spec, ARCHES["sm121"], gates)
        assert {p.name for phases in chosen.values() for p in phases if "moe" in p.covers} == {kernel}
    chosen, _ = select(default_spec(), ARCHES["sm90"], Gates(moe_kernel="cutlass", activation="bf16"))  # type: ignore[arg-type]
    assert "borrowed.cutlass_moe" in {p.name for p in chosen["decode"]}
