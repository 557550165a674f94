"""The embedding in CUDA C++: exact, chosen for prompts and batches, compiled for every architecture it claims."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from halfbyte import gates
from halfbyte.architectures import GPU_ARCHES
from halfbyte.gates import Gates
from halfbyte.kernels import prove
from halfbyte.kernels.cuda.device.host import KernelMachine, gpu
from halfbyte.kernels.cuda.embedding.phase import CudaEmbed, EmbedArgs, embed_build, gather_rows
from halfbyte.kernels.launch import nvrtc_available
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import choose
from halfbyte.ops.embedding import embed
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.emulator import Emulator, mirror_fields, sizes, struct_fields

SPEC = prove.default_spec()


def check(machine: KernelMachine, device: str, rows: int, hidden: int) -> None:
    g = torch.Generator().manual_seed(rows)
    table = torch.randn((50, hidden), generator=g).bfloat16()
    table[7, :4] = torch.tensor([float("inf"), float("nan"), -0.0, 1e-39])
    tokens = torch.randint(0, 50, (rows,), generator=g, dtype=torch.int32)
    tokens[0], tokens[-1] = 7, 49
    x = gather_rows(machine, tokens.to(device), table.to(device)).cpu()
    assert torch.equal(x.view(torch.int32), embed(tokens, table).view(torch.int32))  # to the bit: NaN and -0, too


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (3, 2880), (70, 64)])
def test_rows_are_the_tables(rows: int, hidden: int) -> None:
    check(Emulator(2), "cpu", rows, hidden)


def test_no_rows_launch_nothing() -> None:
    assert gather_rows(Emulator(1), torch.zeros(0, dtype=torch.int32), torch.zeros(4, 8).bfloat16()).shape == (0, 8)


def test_mirrored_structs() -> None:
    build = embed_build()
    assert sizes(build.program, 3) == [ctypes.sizeof(EmbedArgs), build.shared, build.threads]
    assert struct_fields(build.program, "Embed") == mirror_fields(EmbedArgs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hidden": 2884}, "eight values"), ({"formats": SPEC.formats | {"embed": "f32"}}, "bf16, not in f32")],
)
def test_refusals(changes: dict[str, object], reason: str) -> None:
    assert CudaEmbed().refuse(SPEC, ARCHES["sm90"], Gates()) is None
    assert reason in str(CudaEmbed().refuse(replace(SPEC, **changes), ARCHES["sm90"], Gates()))  # type: ignore[arg-type]
    assert "not for cpu" in str(CudaEmbed().refuse(SPEC, ARCHES["cpu"], Gates()))


@pytest.mark.parametrize("arch", [a.name for a in GPU_ARCHES.values() if a.family in CudaEmbed.families])
def test_prompts_and_batches_take_it(arch: str) -> None:
    selection = choose(NAMED["120b"], Gates(), ARCHES[arch]).selection
    assert selection.chosen["prefill"][0] == selection.chosen["batch"][0] == "cuda.embed"
    selection = choose(NAMED["120b"], gates.parse({"linear_kernel": "triton"}, env={}), ARCHES[arch]).selection
    assert selection.chosen["prefill"][0] == "triton.embed"


@pytest.mark.skipif(nvrtc_available() is not None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", GPU_ARCHES)
def test_compiles(arch: str) -> None:
    pytest.importorskip("triton")
    evidence = prove.prove_build("cuda.embed", embed_build(), ARCHES[arch])
    assert evidence.ok, prove.show(evidence)
    assert (evidence.spilled_bytes, evidence.target) == (0, ARCHES[arch].target)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_on_a_gpu(rows: int) -> None:
    check(gpu(), "cuda", rows, 2880)
