"""Every pinned dependency has a wheel for Linux on aarch64, and torch gets what it asks for: by a record of the index
that fits the pins.
"""

from __future__ import annotations

import json

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.packages import aarch64

RECORD = json.loads(aarch64.RECORD.read_text(encoding="utf-8"))
# What has none, and why that is no loss on such a machine.
WITHOUT = {
    "llama-cpp-python": "comes as sources on every machine; only the comparison with llama.cpp builds it",
}


def test_the_record_is_of_todays_pins() -> None:
    pins = {**aarch64.pins(aarch64.EVERYWHERE, aarch64.WITHOUT_CUDA), **aarch64.image_pins()}
    assert {name: p["version"] for name, p in RECORD["packages"].items()} == pins, (
        "the pins have changed; run python -m bench.packages.aarch64"
    )
    assert RECORD["pythons"] == ["3.11", "3.12", "3.13", "3.14"]
    assert RECORD["made"] >= "2026-11-16"


def test_every_pin_has_a_wheel_for_every_python() -> None:
    lacking = {name for name, p in RECORD["packages"].items() if None in p["wheels"].values()}
    assert lacking == set(WITHOUT), {n: RECORD["packages"][n] for n in lacking ^ set(WITHOUT)}


def test_pins_for_every_machine_leave_torch_what_it_asks_for() -> None:
    """PyPI's torch, which a machine with a GPU takes, wants one version of Triton and of CUDA's libraries."""
    asks = [Requirement(line) for line in RECORD["torch_asks"]]
    assert "triton" in {r.name for r in asks}, "a torch of PyPI's brings Triton"
    everywhere = {canonicalize_name(name): version for name, version in aarch64.pins(aarch64.EVERYWHERE).items()}
    refused = [str(r) for r in asks if not r.specifier.contains(everywhere.get(canonicalize_name(r.name), "0"), True)
               and canonicalize_name(r.name) in everywhere]  # fmt: skip
    assert not refused
    assert not [name for name in everywhere if name.startswith(("nvidia-", "cuda-"))], "torch's CUDA asks for others"


def test_the_image_of_vllm_names_versions_that_vllm_takes() -> None:
    named = aarch64.image_pins()
    assert set(named) == {"vllm", "fastsafetensors"}
    asks = {canonicalize_name(r.name): r.specifier for r in map(Requirement, RECORD["vllm_asks"])}
    assert asks["fastsafetensors"].contains(named["fastsafetensors"])
    assert asks["torch"].contains(aarch64.pins(aarch64.EVERYWHERE)["torch"])


def test_a_wheel_is_chosen_as_pip_would() -> None:
    files = [
        "numpy-2.4.6-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl",
        "numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl",
        "numpy-2.4.6-cp312-cp312-musllinux_1_2_aarch64.whl",
        "numpy-2.4.5-cp312-cp312-manylinux_2_28_aarch64.whl",
        "numpy-2.4.6.tar.gz",
    ]
    assert aarch64.choose(files, "2.4.6", (3, 11)) == files[0]
    assert aarch64.choose(files, "2.4.6", (3, 12)) is None, "x86_64, musl and another version do not count"
    assert aarch64.choose(["a-1.0-py3-none-any.whl"], "1.0", (3, 14)) == "a-1.0-py3-none-any.whl"
    assert aarch64.choose(["a-1.0-cp39-abi3-manylinux_2_34_aarch64.whl"], "1.0", (3, 14)) is not None
    assert aarch64.choose(["a-1.0-cp39-abi3-manylinux_2_40_aarch64.whl"], "1.0", (3, 14)) is None, "too new a glibc"
