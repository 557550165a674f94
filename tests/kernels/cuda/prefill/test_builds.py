"""What grouped phases say they launch is what they launch: proofs and the record of what ran rest on it."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import layouts
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Moe, Fp8Out
from halfbyte.kernels.cuda.prefill.layer import Fp8PrefillLayer, PrefillLayer
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Moe, Mxfp8Moe, Mxfp8Out
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe, GroupedOut, GroupedPhase
from halfbyte.kernels.cuda.prefill.sync import SyncMoe, SyncOut
from halfbyte.kernels.launch import Build, Program
from halfbyte.kernels.prove import default_spec
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.emulator import Emulator


class Recorder(Emulator):
    """Remembers what it is asked to run, and runs it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.programs: set[Program] = set()

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        self.programs.add(build.program)
        super().run(build, grid, args)


def mxfp4(*shape: int) -> formats.MXTensor:
    g = torch.Generator().manual_seed(len(shape))
    return layouts.convert(formats.quantize(torch.randn(shape, generator=g), "mxfp4"), "tile16")


SPEC = replace(default_spec(dense="mxfp4"), hidden=64, intermediate=64, experts=4, top_k=2)


@pytest.mark.parametrize(
    ("phase", "arch"),
    [(GroupedMoe(), "sm90"), (Fp8Moe(), "sm90"), (SyncMoe(), "sm121"), (Mxfp8Moe(), "sm121"), (Mxfp4Moe(), "sm121")],
    ids=lambda x: getattr(x, "name", x),
)
def test_experts_launch_what_their_phase_builds(phase: GroupedPhase, arch: str) -> None:
    machine = Recorder()
    experts = phase.experts(
        Workspace(machine, {}, torch.device("cpu")), mxfp4(4, 128, 64), torch.zeros(4, 128), mxfp4(4, 64, 64),
        torch.zeros(4, 64), limit=7.0, alpha=1.702,
    )  # fmt: skip
    ids = torch.tensor([[0, 1], [1, 3]], dtype=torch.int32)
    experts.run(torch.ones(2, 64), ids, torch.ones(2, 2), torch.zeros(2, 64))
    assert len(machine.programs) >= 5
    assert machine.programs <= {b.program for b in phase.builds(SPEC, ARCHES[arch])}


@pytest.mark.parametrize(
    ("phase", "arch"),
    [(GroupedOut(), "sm90"), (Fp8Out(), "sm90"), (SyncOut(), "sm121"), (Mxfp8Out(), "sm121")],
    ids=lambda x: getattr(x, "name", x),
)
def test_projections_launch_what_their_phase_builds(phase: GroupedPhase, arch: str) -> None:
    machine = Recorder()
    dense = phase.dense(Workspace(machine, {}, torch.device("cpu")), mxfp4(64, 64), None, "o")
    for rows in (1, 70):
        dense.run(torch.ones(rows, 64))
    assert len(machine.programs) >= 2
    assert machine.programs <= {b.program for b in phase.builds(SPEC, ARCHES[arch])}


@pytest.mark.parametrize("phase", [PrefillLayer(), Fp8PrefillLayer()], ids=lambda p: p.name)
def test_a_layer_declares_its_parts_and_tritons_kernels(phase: PrefillLayer) -> None:
    declared = {d.name for d in phase.declares(SPEC, ARCHES["sm90"])}
    rows = {"pack_rows", "sum_pack_rows", "group_rows", "sum_rows"}
    assert declared >= {"grouped", "flash", "angles_kernel", "router_kernel", *rows}
    assert ("requantize" in declared) == isinstance(phase, Fp8PrefillLayer)
