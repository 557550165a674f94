"""Save and load weights of a network in training (bf16, in parts), and write the shipped checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fakequant
import torch
from network import GptOss, Layer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte.formats import mxfp4
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.config_json import to_config_json

PART = 14_000_000  # bytes


def _split(tensors: dict[str, Tensor], limit: int = PART) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, t in tensors.items():
        if size and size + t.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = t
        size += t.nbytes
    return parts


def save_weights(model: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().bfloat16().contiguous().cpu() for name, p in model.named_parameters()}
    for i, part in enumerate(_split(tensors)):
        path = folder / f"weights-{i}.safetensors"
        save_file(part, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # never half a file, however the run ends


def load_weights(model: nn.Module, folder: Path) -> None:
    """From a stage's folder (the bf16 parent), or from a shipped one (experts as rounded as they are there)."""
    if (folder / "model.safetensors.index.json").exists():
        return _load_shipped(model, folder)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise SystemExit(f"{folder} holds no weights-*.safetensors; run the stage before this one first")
    parameters = dict(model.named_parameters())
    if set(tensors) != set(parameters):
        raise SystemExit(f"{folder} holds the weights of another network")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(tensors[name].to(p.device, torch.float32))


@torch.no_grad()
def _load_shipped(model: nn.Module, folder: Path) -> None:
    assert isinstance(model, GptOss)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(path)

    def unpacked(name: str) -> Tensor:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        shape = (*blocks.shape[:2], blocks.shape[2] * 32)
        return mxfp4.dequantize(MXTensor(blocks.flatten(2), scales, shape, "mxfp4"))

    model.embed.copy_(tensors["model.embed_tokens.weight"])
    model.norm.weight.copy_(tensors["model.norm.weight"])
    model.lm_head.copy_(tensors["lm_head.weight"])
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        at = f"model.layers.{i}"
        layer.attn_norm.weight.copy_(tensors[f"{at}.input_layernorm.weight"])
        layer.mlp_norm.weight.copy_(tensors[f"{at}.post_attention_layernorm.weight"])
        for name in ("q", "k", "v", "o"):
            getattr(layer, name).copy_(tensors[f"{at}.self_attn.{name}_proj.weight"])
            getattr(layer, f"{name}_bias").copy_(tensors[f"{at}.self_attn.{name}_proj.bias"])
        layer.sinks.copy_(tensors[f"{at}.self_attn.sinks"])
        layer.router.copy_(tensors[f"{at}.mlp.router.weight"])
        layer.router_bias.copy_(tensors[f"{at}.mlp.router.bias"])
        both, bias = unpacked(f"{at}.mlp.experts.gate_up_proj"), tensors[f"{at}.mlp.experts.gate_up_proj_bias"]
        layer.gate.copy_(both[:, ::2])
        layer.up.copy_(both[:, 1::2])
        layer.gate_bias.copy_(bias[:, ::2])
        layer.up_bias.copy_(bias[:, 1::2])
        layer.down.copy_(unpacked(f"{at}.mlp.experts.down_proj"))
        layer.down_bias.copy_(tensors[f"{at}.mlp.experts.down_proj_bias"])


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows alternate gate, up: [E, I, ...] twice -> [E, 2I, ...]."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def exported(model: GptOss) -> dict[str, Tensor]:
    """The tensors of OpenAI's checkpoint layout: experts in MXFP4, everything else bf16."""
    c = model.c
    out: dict[str, Tensor] = {}

    def dense(name: str, t: Tensor) -> None:
        out[name] = t.detach().to(torch.bfloat16).contiguous().cpu()

    def packed(name: str, t: Tensor) -> None:
        q = mxfp4.quantize(fakequant.rounded(t.detach()).cpu() + 0.0)  # + 0: no negative zeros
        out[f"{name}_blocks"] = q.data.view(*t.shape[:-1], t.shape[-1] // 32, 16).contiguous()
        out[f"{name}_scales"] = q.scales.view(*t.shape[:-1], t.shape[-1] // 32).contiguous()

    dense("model.embed_tokens.weight", model.embed)
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        at = f"model.layers.{i}"
        dense(f"{at}.input_layernorm.weight", layer.attn_norm.weight)
        for name in ("q", "k", "v", "o"):
            dense(f"{at}.self_attn.{name}_proj.weight", getattr(layer, name))
            dense(f"{at}.self_attn.{name}_proj.bias", getattr(layer, f"{name}_bias"))
        dense(f"{at}.self_attn.sinks", layer.sinks)
        dense(f"{at}.post_attention_layernorm.weight", layer.mlp_norm.weight)
        dense(f"{at}.mlp.router.weight", layer.router)
        dense(f"{at}.mlp.router.bias", layer.router_bias)
        packed(f"{at}.mlp.experts.gate_up_proj", interleaved(layer.gate, layer.up))
        dense(f"{at}.mlp.experts.gate_up_proj_bias", interleaved(layer.gate_bias, layer.up_bias))
        packed(f"{at}.mlp.experts.down_proj", layer.down)
        dense(f"{at}.mlp.experts.down_proj_bias", layer.down_bias)
    dense("model.norm.weight", model.norm.weight)
    dense("lm_head.weight", model.lm_head)
    assert c.layer_kinds == model.c.layer_kinds
    return out


def export(model: GptOss, folder: Path, limit: int = PART) -> None:
    """Write shards, index, config and generation config. The tokenizer is written by its own stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    parts = _split(exported(model), limit)
    index: dict[str, str] = {}
    total = 0
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
        total += sum(t.nbytes for t in part.values())
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write(folder / "config.json", to_config_json(model.c))
    _write(folder / "generation_config.json", generation_config(model.c))


def generation_config(c: ModelConfig) -> dict[str, Any]:
    return {
        "bos_token_id": c.pad_token - 1,
        "do_sample": True,
        "eos_token_id": list(c.eos_tokens),
        "pad_token_id": c.pad_token,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
