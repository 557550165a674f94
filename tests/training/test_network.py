"""The trained network is gpt-oss: it equals transformers' in float32, packed or not, and exports what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint
import fakequant
import pytest
import torch
from network import Ablation, GptOss, Packed, block_masks, dense_masks

from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.config_json import read_config_json, to_config_json

CONFIG = ModelConfig(
    layers=4, hidden=64, intermediate=32, experts=6, top_k=4, heads=4, kv_heads=2, head_dim=16, vocab=97, window=8,
    max_context=512, yarn=Yarn(factor=8.0, original_context=64), eos_tokens=(96,), pad_token=95,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GptOss:
    torch.manual_seed(3)
    m = GptOss(CONFIG)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "bias" in name or "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
            p.copy_(p.bfloat16().float())
    return m


def states(model: GptOss, tokens: torch.Tensor, **options: object) -> torch.Tensor:
    """Logits of whole rows through the cached path."""
    position = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    cache = model.new_cache(tokens.shape[0], tokens.shape[1], torch.float32)
    x, _ = model.step(tokens, position, cache, dtype=torch.float32, **options)  # type: ignore[arg-type]
    return model.logits(x)


def hf_model(model: GptOss) -> torch.nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    raw = to_config_json(CONFIG)
    raw.pop("quantization_config")
    raw["torch_dtype"] = "float32"
    hf = GptOssForCausalLM(GptOssConfig(**raw, attn_implementation="eager")).float().eval()
    tensors = checkpoint.exported(model)
    weights: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}.mlp.experts"
        both = checkpoint.interleaved(layer.gate, layer.up)
        weights[f"{at}.gate_up_proj"] = fakequant.rounded(both).transpose(1, 2).contiguous()
        weights[f"{at}.down_proj"] = fakequant.rounded(layer.down).transpose(1, 2).contiguous()
    weights |= {k: v.float() for k, v in tensors.items() if not k.endswith(("_blocks", "_scales"))}
    hf.load_state_dict(weights)
    return hf


@torch.no_grad()
def test_equals_transformers_in_float32(model: GptOss) -> None:
    tokens = torch.randint(0, 97, (2, 120), generator=torch.Generator().manual_seed(1))
    want = hf_model(model)(tokens).logits
    got = states(model, tokens)
    assert (got - want).norm() / want.norm() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    "ablation",
    [Ablation(sinks=False), Ablation(yarn=False), Ablation(window=False), Ablation(swap_experts=(0, 1))],
    ids=["sinks", "yarn", "window", "experts"],
)
def test_every_ablation_changes_the_logits(model: GptOss, ablation: Ablation) -> None:
    tokens = torch.randint(0, 97, (1, 120), generator=torch.Generator().manual_seed(2))
    whole, broken = states(model, tokens), states(model, tokens, ablation=ablation)
    assert (whole - broken).norm() / whole.norm() > 1e-2


@torch.no_grad()
def test_packed_branches_equal_separate_conversations(model: GptOss) -> None:
    g = torch.Generator().manual_seed(4)
    begin, one, two, other = (torch.randint(0, 97, (n,), generator=g) for n in (21, 12, 15, 16))
    token = torch.cat((begin, one, two, other))[None]
    position = torch.cat((torch.arange(21), torch.arange(21, 33), torch.arange(21, 36), torch.arange(16)))[None]
    document = torch.tensor([0] * 48 + [1] * 16)[None]
    branch = torch.tensor([0] * 21 + [1] * 12 + [2] * 15 + [0] * 16)[None]
    batch = Packed(token, token, torch.zeros_like(token), position, document, branch)
    h, _, _ = model.hidden(token, position, *dense_masks(batch, CONFIG.window), dtype=torch.float32, quantized=True)
    packed = torch.nn.functional.linear(h, model.lm_head)[0]
    for tokens, where in (
        (torch.cat((begin, one)), slice(21, 33)),
        (torch.cat((begin, two)), slice(33, 48)),
        (other, slice(48, 64)),
    ):
        alone = states(model, tokens[None])[0][-(where.stop - where.start) :]
        assert (packed[where] - alone).norm() / alone.norm() < 1e-5


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_masks_equal_the_dense_ones(model: GptOss) -> None:
    model.requires_grad_(False)  # flex attention refuses a backward on CPU
    g = torch.Generator().manual_seed(5)
    token = torch.randint(0, 97, (2, 1024), generator=g)
    starts = torch.tensor([[0, 300, 320, 700, 1010], [0, 50, 400, 410, 1000]])
    document = (torch.arange(1024)[None, :, None] >= starts[:, None, :]).sum(-1) - 1
    inside = torch.arange(1024)[None] - starts.gather(1, document)
    branch = (inside > 150).long() + (inside > 220).long()
    position = torch.where(branch == 2, inside - 70, inside)
    batch = Packed(token, token, torch.zeros_like(token), position, document, branch)
    dense, _, _ = model.hidden(token, position, *dense_masks(batch, 8), dtype=torch.float32, quantized=False)
    full, sliding = block_masks(batch, 8)
    assert full.sparsity() > 40
    assert sliding.sparsity() > full.sparsity()
    assert int(full.full_kv_num_blocks.sum()) > 0
    block, _, _ = model.hidden(token, position, full, sliding, dtype=torch.float32, quantized=False)
    assert (dense - block).norm() / dense.norm() < 1e-5


@torch.no_grad()
def test_generation_does_not_depend_on_its_neighbours(model: GptOss) -> None:
    g = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, 95, (n,), generator=g).tolist() for n in (5, 40, 17)]
    together = model.generate(prompts, 12, chunk=16)
    alone = [model.generate([p], 12)[0] for p in prompts]
    assert together == alone


def test_export_packs_exactly_what_was_trained(model: GptOss, tmp_path: Path) -> None:
    from halfbyte.formats import mxfp4
    from halfbyte.formats.tensor import MXTensor

    checkpoint.export(model, tmp_path, limit=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    from safetensors.torch import load_file

    name = "model.layers.2.mlp.experts.gate_up_proj"
    blocks = load_file(tmp_path / index[f"{name}_blocks"])[f"{name}_blocks"]
    scales = load_file(tmp_path / index[f"{name}_scales"])[f"{name}_scales"]
    shape = (CONFIG.experts, 2 * CONFIG.intermediate, CONFIG.hidden)
    assert blocks.shape == (*shape[:2], CONFIG.hidden // 32, 16)
    packed = MXTensor(blocks.flatten(2), scales, shape, "mxfp4")
    layer = model.layers[2]
    assert torch.equal(mxfp4.dequantize(packed), fakequant.rounded(checkpoint.interleaved(layer.gate, layer.up)))
    again = GptOss(CONFIG)
    checkpoint.load_weights(again, tmp_path)
    first, second = checkpoint.exported(model), checkpoint.exported(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert read_config_json(tmp_path).config.with_(name=CONFIG.name) == CONFIG
