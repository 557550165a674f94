"""Whole plans on a GPU: a small model through every regime, against the reference with the same quantisation points.

How close is close enough is measured, not guessed: the reference is run again with noise of the size of the roundings
it does not make, and a plan may be half as far again from the reference as that.

Small enough for compute-sanitizer: `compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python
-m pytest -m gpu tests/kernels/test_on_gpu.py` (API errors: cuda-bindings asks the driver for functions it has not).
Most of the time is compilers: `-n 8` spreads the cases over processes, and a second run finds everything in the caches.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from halfbyte import gates
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.device import host
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import reference, select
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Launch
from halfbyte.plan.select import PlanChoice
from halfbyte.plan.step import Step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

# The proportions of gpt-oss (eight query heads to a kv head, heads of 64), a window that the prompt passes.
SMALL = ModelConfig(
    layers=2, hidden=256, intermediate=192, experts=32, top_k=4, heads=16, kv_heads=2, head_dim=64, vocab=512,
    window=128, max_context=1024, yarn=Yarn(factor=8.0, original_context=128), eos_tokens=(1,), pad_token=0,
    name="small-on-gpu",
)  # fmt: skip
CHUNKS = (150, 20, 1, 1, 3, 70)  # prefill, batch, decode, decode, three drafts, prefill over a cache
TRITON = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"}
CASES: list[tuple[str, dict[str, str]]] = [
    ("exact", {}),
    ("balanced", {}),
    ("fast", {}),
    ("fast", {"attention": "triton"}),  # the grouped products for few rows too
    ("exact", TRITON),
    ("balanced", TRITON | {"activation": "int8"}),
    ("fast", {"activation": "int8"}),
    ("fast", {"activation": "fp8"}),
    ("fast", {"activation": "mxfp8"}),
    ("fast", {"activation": "mxfp4", "kv_dtype": "fp8"}),
]
NUMBERS = ("activation", "kv_dtype")  # the flags that change what is computed, not by which kernel
ROOM = 1.5  # times what roundings of bf16 size do to the reference itself


def on_device(g: gates.Gates, without: tuple[str, ...] = ()) -> GptOss:
    """`without`: phases that are taken for absent."""
    choice = choose(SMALL, g, arch_of("cuda"))
    spec, chosen, selection = choice.spec, choice.chosen, choice.selection
    if without:
        others = [p for p in select.all_phases() if p.name not in without]
        chosen, selection = select.select(spec, arch_of("cuda"), g, others)
    moved = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    for layer, role, tensor in list(moved.items()):
        assert not isinstance(tensor, checkpoint.DenseTiles)
        setattr(moved if layer is None else moved.layers[layer], role, tensor.to("cuda"))
    mine = checkpoint.assemble(checkpoint.MemorySource(moved), layouts=selection.layouts)
    return GptOss(mine, g, choice=PlanChoice(spec, chosen, selection))


def reference_of(g: gates.Gates, noise: int | None = None) -> GptOss:
    """The reference with the quantisation points of `g`. With `noise`, a seed: queries and attention's result, which
    every kernel here rounds to bf16 and the reference keeps in float32, are off by as much as that rounding."""
    spec = choose(SMALL, g, ARCHES["sm90"]).spec
    oracle = select.select(spec, ARCHES["cpu"], gates.parse({"layers": str(g.layers)}, env={}), reference.PHASES)
    model = GptOss(synthetic.make(SMALL, 3, layer_formats=g.layer_formats), g, choice=PlanChoice(spec, *oracle))
    if noise is not None:
        random = torch.Generator().manual_seed(noise)
        for bound in model.plan.bound.values():
            bound[:] = [replace(b, launch=_shaken(b.launch, b.phase.covers[-1], random)) for b in bound]
    return model


def _shaken(launch: Launch, last: str, random: torch.Generator) -> Launch:
    name = {"rope": "q", "attention": "attn"}.get(last)

    def run(step: Step, acts: Activations) -> None:
        launch(step, acts)
        if name is not None:
            exact = getattr(acts, name)
            setattr(acts, name, exact * (1 + (torch.rand(exact.shape, generator=random) - 0.5) * 2**-8))

    return run


def logits(model: GptOss) -> torch.Tensor:
    tokens = torch.randint(0, SMALL.vocab, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0)).tolist()
    solo, out, at = SingleSequence(model, 512), [], 0
    with torch.inference_mode():
        for n in CHUNKS:
            out.append(solo.feed(tokens[at : at + n], all_logits=True).float().cpu())
            at += n
    return torch.cat(out)


class Distance(NamedTuple):
    """How far logits are from others. A row whose router has chosen another expert is far off and tells little, so the
    median row stands beside the whole."""

    whole: float
    median: float
    sure: float  # share of rows whose highest logit is higher than the second by more than the two could have moved

    @classmethod
    def of(cls, got: torch.Tensor, expected: torch.Tensor) -> Distance:
        off = (got - expected).norm(dim=1) / expected.norm(dim=1)
        sure = _sure(got, expected).float().mean()
        return cls(float((got - expected).norm() / expected.norm()), float(off.median()), float(sure))


def _sure(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    top = expected.topk(2).values
    return top[:, 0] - top[:, 1] > 2 * (got - expected).abs().amax(1)


@functools.cache
def expected_of(preset: str, numbers: tuple[tuple[str, str], ...]) -> tuple[torch.Tensor, list[Distance]]:
    """The reference's logits, and how far bf16-sized noise moves them: what a kernel's own roundings may do."""
    g = gates.parse(dict(numbers), env={}, preset=preset)
    plain = logits(reference_of(g))
    return plain, [Distance.of(logits(reference_of(g, seed)), plain) for seed in range(4)]


@pytest.mark.parametrize(("preset", "flags"), CASES, ids=["-".join([p, *f.values()]) for p, f in CASES])
def test_logits(preset: str, flags: dict[str, str]) -> None:
    arch = arch_of("cuda")
    try:
        mine = on_device(gates.parse(flags, env={}, preset=preset))
    except PlanError as e:  # GPUs before SM89 multiply no fp8
        assert arch.family == "sm8x", e
        assert flags.get("activation") in ("fp8", "mxfp8", "mxfp4"), e
        pytest.skip(str(e).splitlines()[0])
    got = logits(mine)
    expected, moved = expected_of(preset, tuple((k, v) for k, v in flags.items() if k in NUMBERS))
    ran = mine.plan.record.phases()
    assert ran
    assert not [name for name in ran if name.startswith("reference.")]
    if set(flags) <= {"attention"}:
        assert ("cuda.decode_step" in ran) == (not flags)  # phases that hold attention are left out with it
    if arch.name == "sm90" and set(flags) <= {"attention"}:
        assert mine.plan.record.phases("prefill") >= {"cuda.grouped_moe" if flags else "cuda.prefill_layer"}
    assert [str(d) for d in mine.plan.differences()] == []
    assert torch.isfinite(got).all()
    found = Distance.of(got, expected)
    print(f"{preset} {flags}: {found}; the reference with noise: {moved}; {', '.join(sorted(ran))}")
    assert found.whole < ROOM * max(d.whole for d in moved)
    assert found.median < ROOM * max(d.median for d in moved)
    assert found.sure > min(d.sure for d in moved) / ROOM - 0.02  # 2 %: five rows, by chance
    sure = _sure(got, expected)
    assert got.argmax(1)[sure].equal(expected.argmax(1)[sure])


def test_attention_of_prompts_as_sm12x_has_it() -> None:
    """By mma.sync, on any GPU, in a whole plan: as if the kernels of wgmma were not there."""
    g = gates.parse({"attention": "cuda"}, env={}, preset="fast")
    mine = on_device(g, ("cuda.attention_flash", "cuda.prefill_layer", "cuda.prefill_layer_fp8"))
    got = logits(mine)
    expected, moved = expected_of("fast", ())
    assert "cuda.attention_flash_sync" in mine.plan.record.phases("prefill")
    assert [str(d) for d in mine.plan.differences()] == []
    assert torch.isfinite(got).all()
    found = Distance.of(got, expected)
    assert found.whole < ROOM * max(d.whole for d in moved)
    assert found.median < ROOM * max(d.median for d in moved)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_planted_build_is_named(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources compiled with line information: another binary behind the same entry, with the same results."""
    g = gates.parse({}, env={}, preset="fast")

    def difference(model: GptOss) -> list[str]:
        model.allocate_kv(64)
        with torch.inference_mode():
            graph = DecodeGraph(model, 16, 8, feed_back=True)
            if captured:
                graph.capture()
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                assert model.plan.record.graphs[0].replays == 3
                assert model.plan.record.graphs[0].nodes is not None, model.plan.record.graphs[0].unread
                model.plan.record.eager.phases.clear()  # those that warmed up
            else:
                graph.run()
        assert "cuda.batch_layer_fused" in model.plan.record.phases("batch")
        return [str(d) for d in model.plan.differences()]

    if arch_of("cuda").name != "sm90":
        pytest.skip("written for the plan of SM90")
    assert difference(on_device(g)) == []
    host.gpu.cache_clear()
    plain = host.CudaMachine.program
    monkeypatch.setattr(
        host.CudaMachine, "program",
        lambda self, build: replace(p := plain(self, build), options=(*p.options, "--generate-line-info")),
    )  # fmt: skip
    try:
        said = difference(on_device(g))
    finally:
        host.gpu.cache_clear()
    assert any("cuda.batch_layer_fused (batch): launched another build of batch_" in text for text in said), said
