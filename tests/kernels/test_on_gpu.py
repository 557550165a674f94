"""Whole plans on a GPU: a small model through every regime, against the reference with the same quantisation points.

Small enough for compute-sanitizer (`--tool memcheck python -m pytest -m gpu tests/kernels/test_on_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from halfbyte import gates
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.solo import Solo
from halfbyte.plan import reference, select
from halfbyte.plan.phase import ARCHES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

# The proportions of gpt-oss (eight query heads to a kv head, heads of 64), a window that the prompt passes.
SMALL = ModelConfig(
    layers=2, hidden=256, intermediate=192, experts=32, top_k=4, heads=16, kv_heads=2, head_dim=64, vocab=512,
    window=128, max_context=1024, yarn=Yarn(factor=8.0, original_context=128), eos_tokens=(1,), pad_token=0,
    name="small-on-gpu",
)  # fmt: skip
CHUNKS = (150, 20, 1, 1, 3, 70)  # prefill, batch, decode, decode, three drafts, prefill over a cache
TRITON = {"moe_kernel": "triton", "linear_kernel": "triton", "attention": "triton"}
CASES: list[tuple[str, dict[str, str], float]] = [
    ("exact", {}, 2e-2),
    ("balanced", {}, 2e-2),
    ("fast", {}, 2e-2),
    ("fast", {"attention": "triton"}, 2e-2),  # the grouped products for few rows too
    ("exact", TRITON, 2e-2),
    ("balanced", TRITON | {"activation": "int8"}, 3e-2),
    ("fast", {"activation": "int8"}, 3e-2),
    ("fast", {"activation": "fp8"}, 5e-2),
    ("fast", {"activation": "mxfp8"}, 5e-2),
    ("fast", {"activation": "mxfp4", "kv_dtype": "fp8"}, 1e-1),
]


def models(preset: str, flags: dict[str, str]) -> tuple[GptOss, GptOss]:
    g = gates.parse(flags, env={}, preset=preset)
    spec, chosen, selection = choose(SMALL, g, arch_of("cuda"))
    plain = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    moved = synthetic.make(SMALL, 3, layer_formats=g.layer_formats)
    for layer, role, tensor in list(moved.items()):
        assert not isinstance(tensor, checkpoint.DenseTiles)
        setattr(moved if layer is None else moved.layers[layer], role, tensor.to("cuda"))
    mine = checkpoint.assemble(checkpoint.Resident(moved), layouts=selection.layouts)
    oracle = select.select(spec, ARCHES["cpu"], gates.parse({"layers": str(g.layers)}, env={}), reference.PHASES)
    return GptOss(mine, g, choice=(spec, chosen, selection)), GptOss(plain, g, choice=(spec, *oracle))


def logits(model: GptOss, tokens: Sequence[int]) -> torch.Tensor:
    solo, out, at = Solo(model, 512), [], 0
    for n in CHUNKS:
        out.append(solo.feed(tokens[at : at + n], all_logits=True).float().cpu())
        at += n
    return torch.cat(out)


@pytest.mark.parametrize(("preset", "flags", "bound"), CASES, ids=["-".join([p, *f.values()]) for p, f, _ in CASES])
def test_logits(preset: str, flags: dict[str, str], bound: float) -> None:
    mine, oracle = models(preset, flags)
    tokens = torch.randint(0, SMALL.vocab, (sum(CHUNKS),), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        got, expected = logits(mine, tokens), logits(oracle, tokens)
    ran = mine.plan.record.phases()
    assert ran
    assert not [name for name in ran if name.startswith("reference.")]
    if torch.cuda.get_device_capability() == (9, 0) and set(flags) <= {"attention"}:
        assert mine.plan.record.phases("prefill") & {"cuda.grouped_moe"}
        assert ("cuda.decode_step" in ran) == (not flags)
    assert torch.isfinite(got).all()
    error = float((got - expected).norm() / expected.norm())
    print(f"{preset} {flags}: error {error:.2e}; {', '.join(sorted(ran))}")
    assert error < bound
    top = expected.topk(2).values
    sure = top[:, 0] - top[:, 1] > 2 * (got - expected).abs().amax(1)
    assert float(sure.float().mean()) > 0.3
    assert got.argmax(1)[sure].equal(expected.argmax(1)[sure])
