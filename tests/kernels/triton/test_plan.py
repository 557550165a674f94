"""A whole model through the Triton plan of an architecture, against the reference with the same quantisation points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from halfbyte import gates
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import reference, select
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.record import NodeKernel
from tests.kernels.triton.triton_cases import error

TINY = ModelConfig(
    layers=2, hidden=96, intermediate=64, experts=4, top_k=2, heads=4, kv_heads=1, head_dim=32, vocab=64, window=16,
    max_context=512, yarn=Yarn(factor=8.0, original_context=64), eos_tokens=(1,), pad_token=0, name="tiny",
)  # fmt: skip
GB10 = {"layers": "mxfp4", "activation": "mxfp8", "kv_dtype": "fp8"}
ALL_TRITON = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"}


def models(arch: str, flags: dict[str, str]) -> tuple[GptOss, GptOss]:
    g = gates.parse(ALL_TRITON | flags, env={})
    choice = choose(TINY, g, ARCHES[arch])
    mine = synthetic.make(TINY, 3, layer_formats=g.layer_formats, layouts=choice.selection.layouts)
    plain = synthetic.make(TINY, 3, layer_formats=g.layer_formats)
    oracle = select.select(choice.spec, ARCHES["cpu"], gates.parse(flags, env={}), reference.PHASES)
    return GptOss(mine, g, choice=choice), GptOss(
        plain, g, choice=replace(choice, chosen=oracle[0], selection=oracle[1])
    )


def logits(model: GptOss, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    solo, out, at = SingleSequence(model, 128), [], 0
    for n in chunks:
        out.append(solo.feed(tokens[at : at + n], all_logits=True))
        at += n
    return torch.cat(out)


@pytest.mark.parametrize(
    ("arch", "chunks", "flags", "bound"),
    [
        ("sm90", [12, 1, 3], {"layers": "checkpoint"}, 2e-2),  # batch, decode, three drafts
        ("sm121", [5, 1], GB10, 1e-1),
        pytest.param("sm121", [66, 1], GB10, 1e-1, marks=pytest.mark.slow),  # prefill, decode
    ],
)
def test_logits(arch: str, chunks: list[int], flags: dict[str, str], bound: float) -> None:
    """Only Triton phases run; logits agree, and tokens wherever the reference's margin exceeds the difference."""
    mine, oracle = models(arch, flags)
    tokens = torch.randint(0, 64, (sum(chunks),), generator=torch.Generator().manual_seed(0)).tolist()
    got, expected = logits(mine, tokens, chunks), logits(oracle, tokens, chunks)
    ran = mine.plan.record.phases()
    assert ran
    assert all(name.startswith("triton.") for name in ran)
    assert mine.plan.differences() == [], "every kernel is one that its phase declares"
    assert mine.plan.record.launches()[NodeKernel("gate_up_kernel", "interpreted")] > 0
    assert ("triton.moe_split" in ran) == (arch == "sm121")
    assert error(got, expected) < bound
    top = expected.topk(2).values
    sure = top[:, 0] - top[:, 1] > 2 * (got - expected).abs().amax(1)
    assert float(sure.float().mean()) > 0.5
    assert got.argmax(1)[sure].equal(expected.argmax(1)[sure])
