"""Every kernel that a plan launches is one that its phases declare, and every launch says what it is for.

Plans of SM90 and SM12x are bound and walked on a CPU over a machine that runs nothing: the launches are the real ones.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halfbyte import gates
from halfbyte.formats import MXTensor
from halfbyte.kernels import launch
from halfbyte.kernels.cuda.batch import phase as batch_phase
from halfbyte.kernels.cuda.decode import phase as decode_phase
from halfbyte.kernels.cuda.device import host
from halfbyte.kernels.cuda.prefill import phases
from halfbyte.kernels.launch import Build, Map
from halfbyte.kernels.triton import call
from halfbyte.kernels.triton.call import TritonCall
from halfbyte.lab import timeline
from halfbyte.lab.profile import Span, summarise
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import ARCHES, LAYER, OPERATIONS, Arch
from halfbyte.plan.step import RegimeLimits
from halfbyte.roofline import GPUS, Work

SMALL = ModelConfig(
    layers=2, hidden=256, intermediate=192, experts=32, top_k=4, heads=16, kv_heads=2, head_dim=64, vocab=512,
    window=128, max_context=1024, yarn=Yarn(factor=8.0, original_context=128), eos_tokens=(1,), pad_token=0,
)  # fmt: skip
CHUNKS = (150, 20, 1, 3, 6)  # prefill, batch, decode, drafts, batch
CASES: list[tuple[str, str, dict[str, str]]] = [
    ("sm90", "exact", {}),
    ("sm90", "balanced", {}),
    ("sm90", "fast", {}),
    ("sm90", "fast", {"activation": "long=fp8"}),
    ("sm90", "fast", {"attention": "triton"}),
    ("sm90", "fast", {"activation": "fp8"}),
    ("sm90", "fast", {"activation": "int8"}),
    ("sm121", "fast", {}),
    ("sm121", "exact", {}),
    ("sm121", "fast", {"activation": "prefill=mxfp8"}),
    ("sm121", "fast", {"activation": "prefill=mxfp4"}),
    ("sm100", "fast", {}),
]


class Nothing:
    """A machine that compiles and runs nothing, and reports every launch as a GPU's does."""

    blocks, failure = 132, torch.zeros(2, dtype=torch.int32)

    def __init__(self, arch: Arch) -> None:
        self.target = arch.target
        self._images: dict[Build, KernelImage] = {}

    def load(self, build: Build) -> KernelImage:
        if build not in self._images:
            module = hashlib.sha256(repr(build.program).encode()).hexdigest()[:16]
            launch._compiled[build.program, self.target] = module
            self._images[build] = KernelImage(build.program.entry, module, part=build.part)
        return self._images[build]

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        launched(self.load(build))

    def byte_map(self, data: torch.Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        return (ctypes.c_uint64 * 16)()

    def row_map(self, rows: torch.Tensor, box: tuple[int, int]) -> Map:
        return (ctypes.c_uint64 * 16)()


@pytest.fixture(params=CASES, ids=["-".join([a, p, *f.values()]) for a, p, f in CASES])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GptOss]:
    name, preset, flags = request.param
    arch = ARCHES[name]
    machine = Nothing(arch)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(call, "_compiled", {})
    monkeypatch.setattr(host, "CudaMachine", lambda: machine)  # what gpu() makes, whoever asks
    host.gpu.cache_clear()
    for module in (batch_phase, decode_phase):
        monkeypatch.setattr(module, "current_arch", lambda: arch)
    monkeypatch.setattr(phases, "workspace_of", lambda b: host.Workspace(machine, b.buffers, torch.device("cpu")))

    def triton(self: TritonCall, grid: tuple[int, ...], device: torch.device, **_: Any) -> None:
        call._compiled.setdefault(self.function, set()).add("none")
        launched(KernelImage(self.function, "none", part=self.part))

    monkeypatch.setattr(TritonCall, "launch", triton)
    g = gates.parse(flags, env={}, preset=preset)
    choice = choose(SMALL, g, arch)
    weights = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    assert isinstance(weights.layers[1].down, MXTensor)
    weights.layers[1].down.scales[0, 0, 0] += 20  # so that fp8 products cannot hold this layer's experts
    source = checkpoint.MemorySource(weights)
    model = GptOss(checkpoint.assemble(source, layouts=choice.selection.layouts), g, choice=choice)
    model.plan.arch, model.plan.limits = arch, arch.limits
    yield model
    host.gpu.cache_clear()


def test_every_kernel_is_declared(model: GptOss) -> None:
    solo = SingleSequence(model, 512)
    for n in CHUNKS:
        solo.feed(list(range(n)), all_logits=n < 100)
    if model.spec.activations.get("long"):
        model.plan.limits = RegimeLimits(3, 64, 65, "of a test")
        solo.feed(list(range(80)))
    assert len(model.plan.record.phases()) > 3
    assert [str(d) for d in model.plan.differences()] == []
    assert not [run.phase for run in model.plan.record.runs() if not run.kernels]


def test_every_operation_has_one_row(model: GptOss) -> None:
    """As in a profile, whose account is refused where an operation stands in two rows."""
    work = {op: Work() for op in OPERATIONS}
    for n in (150, 20, 2):
        solo = SingleSequence(model, 512)
        order = timeline.launch_order(lambda n=n, solo=solo: (setattr(solo, "length", 0), solo.feed(list(range(n)))))
        spans = [Span(row, name, float(i), i + 1.0) for i, (name, row) in enumerate(order)]
        p = summarise(f"{n} rows", n, spans, 1, float(len(spans)), work, GPUS["h200"], "")
        assert {op for line in p.lines for op in line.operations} >= {
            "qkv",
            "rope",
            "kv_write",
            "attention",
            "o",
            "moe",
        }
        assert not [line.label for line in p.lines if set(line.operations) == set(LAYER)], "a layer is taken apart"
