"""The table of architectures is complete: what every other part reads is in each record, and the pages name each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte import errors
from halfbyte.architectures import ARCHES, GPU_ARCHES, GPUS, Arch, arch_with, gpu_named
from halfbyte.kernels.cuda.decode.phase import WholeStep
from halfbyte.plan.machine import arch_of_gpu

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "halfbyte").rglob("*.py"))


@pytest.mark.parametrize("arch", GPU_ARCHES.values(), ids=lambda arch: arch.name)
def test_a_record_has_what_others_read(arch: Arch) -> None:
    assert arch.capability is not None
    assert arch_with(arch.capability) is arch
    assert arch.name == "sm{}{}".format(*arch.capability)
    assert arch.shared_memory >= 101_376
    assert arch.oldest_ptxas >= (11, 0)
    assert any(gpu.arch == arch.name for gpu in GPUS.values()), "explain has no GPU to give an account of memory for"
    if arch.family in WholeStep.families:
        assert all(gpu.ghz and gpu.multiprocessors for gpu in GPUS.values() if gpu.arch == arch.name), "predictions"
    assert arch.has_run == ("not measured" not in arch.limits.source)
    if arch.sibling:
        other = ARCHES[arch.sibling]
        assert (other.sibling, other.family, other.features) == (arch.name, arch.family, arch.features)


@pytest.mark.parametrize("page", ["docs/install.md", "docs/packages.md"])
def test_pages_name_every_architecture(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").lower()
    for arch in GPU_ARCHES.values():
        names = [gpu.name.lower() for gpu in GPUS.values() if gpu.arch == arch.name]
        assert arch.target in text or any(name.split(" (")[0] in text for name in names), arch.name


def test_gpus_have_names_of_their_own() -> None:
    names = [name for key, gpu in GPUS.items() for name in (key, *gpu.other_names)]
    assert len(names) == len(set(names))
    assert gpu_named("NVIDIA GeForce RTX 5090").arch == "sm120"
    assert all(gpu_named(name) is GPUS[key] for key, gpu in GPUS.items() for name in (key, gpu.name, *gpu.other_names))
    with pytest.raises(errors.UsageError, match="gtx1080"):
        gpu_named("gtx1080")


def test_a_gpu_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(errors.PlanError, match=f"sm87; .*{', '.join(GPU_ARCHES)}"):
        arch_with((8, 7))


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_a_gpu_without_bf16_is_told_what_serves_it(capability: tuple[int, int]) -> None:
    with pytest.raises(errors.PlanError) as e:
        arch_with(capability)
    said = str(e.value)
    assert said.startswith("this GPU is sm{}{}; it has no bf16 products".format(*capability))
    assert "llama.cpp or LMDeploy" in said
    assert "--device cpu" in said
    assert said.count(".") == 2  # one sentence, and the dot of llama.cpp


def test_targets_have_a_letter_where_there_is_a_copy_engine() -> None:
    assert [a.target for a in GPU_ARCHES.values() if "bulk_copies" not in a.features] == ["sm_80", "sm_86", "sm_89"]
    assert all(a.target.endswith("a") for a in GPU_ARCHES.values() if "bulk_copies" in a.features)


def test_memory_is_called_what_the_box_says() -> None:
    assert gpu_named("NVIDIA GeForce RTX 3090").memory_text == "24 GB"
    assert gpu_named("NVIDIA L40S").memory_text == "48 GB"  # 44.99 GiB with ECC
    assert gpu_named("h200").memory_text == "141 GB"
    assert gpu_named("NVIDIA A100-SXM4-80GB").memory_text == "80 GB"


# ---- the older instruction set on a newer GPU ------------------------------------------------------------------------


def test_an_older_instruction_set_is_planned_for_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arch_of_gpu((9, 0)) is ARCHES["sm90"]
    monkeypatch.setenv("HALFBYTE_GPU_INSTRUCTIONS", "sm86")
    arch = arch_of_gpu((9, 0))
    assert (arch.name, arch.target, arch.shared_memory) == ("sm86", "sm_90", 101_376)
    assert arch.features == ARCHES["sm86"].features
    assert arch_of_gpu((8, 6)) is ARCHES["sm86"]
    with pytest.raises(errors.UsageError, match="cannot run what is made for sm86"):
        arch_of_gpu((8, 0))
    monkeypatch.setenv("HALFBYTE_GPU_INSTRUCTIONS", "sm90")
    with pytest.raises(errors.UsageError, match="is 'sm90'; use one of sm80, sm86, sm89"):
        arch_of_gpu((12, 0))
    monkeypatch.setenv("HALFBYTE_GPU_INSTRUCTIONS", "sm80")
    with pytest.raises(errors.UsageError, match="cannot run what is made for sm80"):
        arch_of_gpu((12, 1))  # which has less shared memory


def test_sources_ask_for_families_and_features() -> None:
    """A comparison with an architecture's name is a list that a new architecture would have to be added to."""
    comparison = re.compile(
        r"""arch\w*(\.name)? *(==|!=|not in|in) *[("'[]+sm_?\d|\bcapability(\[0\])? *(==|!=|<|>=) *\(?\d"""
    )
    hits = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if comparison.search(line)
    ]
    # Messages about where the self-test has been timed, and about the modules that Blackwell's driver needs.
    allowed = ("model/self_test.py", "doctor/checks/gpu.py")
    assert not [hit for hit in hits if not any(place in hit for place in allowed)]


def test_the_table_needs_no_torch() -> None:
    code = "import sys, halfbyte.architectures, halfbyte.doctor.checks.gpu; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
