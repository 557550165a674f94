"""Copies of a gpt-oss checkpoint that compute the same function with other numbers, and some that do not.

Training fixes a network's function, not its numbers: a power of two may move between a norm and the matrix behind it,
experts may change places. A variant of the first kind must give the plain model's tokens through every plan, and its
logits to rounding; one that fails shows where values decide. A variant of the second kind (`CHANGED`) has numbers that
a trained checkpoint may hold and is compared with another implementation.

A model is a dictionary of tensors with Hugging Face's names and its configuration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # elements under one MXFP4 scale


@dataclass
class Checkpoint:
    """Tensors and configuration of a model, in memory."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    tokens: Tensor | None = None  # the plain model's token of each of this one's, where they differ
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        return cls(tensors, json.loads((folder / "config.json").read_text(encoding="utf-8")))

    def write(self, folder: Path, source: Path) -> Path:
        """A folder of one file; the tokenizer's files are those of `source`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (source / name).exists():
                shutil.copy(source / name, folder / name)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder

    def layers(self) -> Iterator[VariantLayer]:
        for i in range(self.config["num_hidden_layers"]):
            yield VariantLayer(self.tensors, f"model.layers.{i}.")

    def octaves(self, count: int, most: int) -> Tensor:
        """Whole numbers from -most to most, both included."""
        return torch.randint(-most, most + 1, (count,), generator=self.generator)

    def multiply(self, name: str, factor: Tensor | float) -> None:
        """Exact for a power of two while bfloat16's exponent holds it."""
        self.tensors[name] = (self.tensors[name].float() * factor).to(self.tensors[name].dtype)


@dataclass
class VariantLayer:
    """One layer's tensors by their short names."""

    tensors: dict[str, Tensor]
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.tensors[self.prefix + name] = value

    def multiply(self, name: str, factor: Tensor | float) -> None:
        self[name] = (self[name].float() * factor).to(self[name].dtype)

    def move_scales(self, name: str, octaves: Tensor | int) -> None:
        """Multiply MXFP4 groups by powers of two."""
        codes = self[name].int() + octaves
        assert int(codes.min()) >= 0, "the scales have no smaller codes"
        assert int(codes.max()) < 255, "the scales have no larger codes"
        self[name] = codes.to(torch.uint8)


Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")
GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router"
ATTENTION_NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
EXPERT_TENSORS = tuple(f"{name}_{part}" for name in (GATE_UP, DOWN) for part in ("blocks", "scales", "bias"))


# ---- the same function ---------------------------------------------------------------------------------------------


def scale_residual(model: Checkpoint, octaves: int) -> None:
    """The residual stream times 2^octaves: norms take it out again."""
    model.multiply("model.embed_tokens.weight", 2.0**octaves)
    for layer in model.layers():
        layer.multiply(f"{O}.weight", 2.0**octaves)
        layer.multiply(f"{O}.bias", 2.0**octaves)
        layer.move_scales(f"{DOWN}_scales", octaves)
        layer.multiply(f"{DOWN}_bias", 2.0**octaves)
    model.config["rms_norm_eps"] *= 4.0**octaves


def spread_experts(model: Checkpoint, octaves: int) -> None:
    """Powers of two between the norm of the MLP and its matrices, one for each group of channels."""
    for layer in model.layers():
        moved = model.octaves(layer[MLP_NORM].numel() // GROUP, octaves)
        channels = moved.repeat_interleave(GROUP)
        layer.multiply(MLP_NORM, channels.float().exp2())
        layer.multiply(f"{ROUTER}.weight", (-channels.float()).exp2())
        layer.move_scales(f"{GATE_UP}_scales", -moved.int())


def spread_attention(model: Checkpoint, octaves: int) -> None:
    """Powers of two between the norm of attention and its matrices, one for each channel."""
    for layer in model.layers():
        moved = model.octaves(layer[ATTENTION_NORM].numel(), octaves).float()
        layer.multiply(ATTENTION_NORM, moved.exp2())
        for name in (Q, K, V):
            layer.multiply(f"{name}.weight", (-moved).exp2())


def spread_head(model: Checkpoint, octaves: int) -> None:
    """Powers of two between the last norm and the head, one for each channel."""
    moved = model.octaves(model.tensors["model.norm.weight"].numel(), octaves).float()
    model.multiply("model.norm.weight", moved.exp2())
    model.multiply("lm_head.weight", (-moved).exp2())


def scale_values(model: Checkpoint, octaves: int) -> None:
    """Values times 2^octaves, which the output projection takes back."""
    for layer in model.layers():
        layer.multiply(f"{V}.weight", 2.0**octaves)
        layer.multiply(f"{V}.bias", 2.0**octaves)
        layer.multiply(f"{O}.weight", 2.0**-octaves)


def scale_keys(model: Checkpoint, octaves: int) -> None:
    """Keys times 2^octaves, which the queries take back."""
    for layer in model.layers():
        for name, sign in ((K, 1), (Q, -1)):
            layer.multiply(f"{name}.weight", 2.0 ** (sign * octaves))
            layer.multiply(f"{name}.bias", 2.0 ** (sign * octaves))


def permute_experts(model: Checkpoint) -> None:
    for layer in model.layers():
        order = torch.randperm(layer[f"{ROUTER}.bias"].numel(), generator=model.generator)
        for name in (*EXPERT_TENSORS, f"{ROUTER}.weight", f"{ROUTER}.bias"):
            layer[name] = layer[name][order]


def duplicate_experts(model: Checkpoint) -> None:
    """Twice as many experts; the router never chooses the copies."""
    for layer in model.layers():
        for name in (*EXPERT_TENSORS, f"{ROUTER}.weight", f"{ROUTER}.bias"):
            layer[name] = torch.cat((layer[name], layer[name]))
        layer[f"{ROUTER}.bias"][layer[f"{ROUTER}.bias"].numel() // 2 :] = -30000.0
    model.config["num_local_experts"] *= 2


def share_router_row(model: Checkpoint) -> None:
    """A row that all experts share, added to the router: no choice and no share of an expert depends on it. The sums
    need more bits than bfloat16 has."""
    for layer in model.layers():
        weight = layer[f"{ROUTER}.weight"].float()
        layer[f"{ROUTER}.weight"] = weight + 0.1 * torch.randn(weight.shape[1], generator=model.generator)


def permute_heads(model: Checkpoint) -> None:
    """Key and value heads change places, each with its query heads."""
    dim, kv_heads = model.config["head_dim"], model.config["num_key_value_heads"]
    group = model.config["num_attention_heads"] // kv_heads
    for layer in model.layers():
        order = torch.randperm(kv_heads, generator=model.generator)
        while bool((order == torch.arange(kv_heads)).all()):
            order = torch.randperm(kv_heads, generator=model.generator)
        heads = (order[:, None] * group + torch.arange(group)).flatten()
        for name, index in ((Q, heads), (K, order), (V, order)):
            rows = (index[:, None] * dim + torch.arange(dim)).flatten()
            layer[f"{name}.weight"], layer[f"{name}.bias"] = layer[f"{name}.weight"][rows], layer[f"{name}.bias"][rows]
        columns = (heads[:, None] * dim + torch.arange(dim)).flatten()
        layer[f"{O}.weight"] = layer[f"{O}.weight"][:, columns]
        layer["self_attn.sinks"] = layer["self_attn.sinks"][heads]


def permute_channels(model: Checkpoint) -> None:
    """Groups of 32 channels of the residual stream change places."""
    groups = model.config["hidden_size"] // GROUP
    order = torch.randperm(groups, generator=model.generator)
    channels = (order[:, None] * GROUP + torch.arange(GROUP)).flatten()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = model.tensors[name][:, channels]
    model.tensors["model.norm.weight"] = model.tensors["model.norm.weight"][channels]
    for layer in model.layers():
        for name in (ATTENTION_NORM, MLP_NORM, f"{O}.weight", f"{O}.bias"):
            layer[name] = layer[name][channels]
        for name in (Q, K, V, ROUTER):
            layer[f"{name}.weight"] = layer[f"{name}.weight"][:, channels]
        for part in ("blocks", "scales"):
            layer[f"{GATE_UP}_{part}"] = layer[f"{GATE_UP}_{part}"][:, :, order]
        for part in ("blocks", "scales", "bias"):
            layer[f"{DOWN}_{part}"] = layer[f"{DOWN}_{part}"][:, channels]


def permute_vocabulary(model: Checkpoint) -> None:
    """Token i of this model is token `tokens[i]` of the plain one."""
    model.tokens = torch.randperm(model.config["vocab_size"], generator=model.generator)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = model.tensors[name][model.tokens]


SAME: dict[str, Callable[[Checkpoint], None]] = {
    "residual x 2^-4": lambda m: scale_residual(m, -4),
    "residual x 2^4": lambda m: scale_residual(m, 4),
    "residual x 2^12": lambda m: scale_residual(m, 12),
    "residual x 2^20": lambda m: scale_residual(m, 20),
    "experts spread by 3": lambda m: spread_experts(m, 3),
    "experts spread by 8": lambda m: spread_experts(m, 8),
    "experts spread by 12": lambda m: spread_experts(m, 12),
    "attention spread by 3": lambda m: spread_attention(m, 3),
    "attention spread by 12": lambda m: spread_attention(m, 12),
    "head spread by 3": lambda m: spread_head(m, 3),
    "values x 2^12": lambda m: scale_values(m, 12),
    "values x 2^-12": lambda m: scale_values(m, -12),
    "keys x 2^8": lambda m: scale_keys(m, 8),
    "keys x 2^-8": lambda m: scale_keys(m, -8),
    "experts permuted": permute_experts,
    "experts duplicated": duplicate_experts,
    "router in float32": share_router_row,
    "heads permuted": permute_heads,
    "channels permuted": permute_channels,
    "vocabulary permuted": permute_vocabulary,
}


NO_ROUNDING = 1e-4


def logit_bound(name: str, preset: str) -> float:
    """How far a variant's logits may be from the plain model's through the same plan of a GPU: their relative error.

    A power of two changes no bit, but for the decode step's residual in fixed point; another order of sums, and the
    kernels that take a float32 router, change what rounds to bf16. Where a matrix is quantised, values, keys and a
    residual of another size round otherwise: q8 has float16 scales, its products float16 weights, and which columns
    folding raises depends on all of qkv."""
    if preset != "exact" and name.startswith(("values", "keys", "residual x 2^-4", "residual x 2^2")):
        return 5e-2
    return 5e-3 if "permuted" in name or "router" in name else NO_ROUNDING


# ---- another function ----------------------------------------------------------------------------------------------


def add_loud_channels(model: Checkpoint, size: float) -> None:
    """Two channels of the residual stream that are far larger than all others from the second layer on."""
    layer = next(layer for i, layer in enumerate(model.layers()) if i == 1)
    layer[f"{O}.bias"][17], layer[f"{O}.bias"][101] = size, -size


def set_sinks(model: Checkpoint, value: float) -> None:
    for layer in model.layers():
        layer["self_attn.sinks"][0::2], layer["self_attn.sinks"][1::2] = value, -value


def scale_attention_logits(model: Checkpoint, factor: float) -> None:
    for layer in model.layers():
        layer.multiply(f"{K}.weight", factor)
        layer.multiply(f"{K}.bias", factor)


def fix_routes(model: Checkpoint) -> None:
    """Every token goes to the same experts."""
    for layer in model.layers():
        layer[f"{ROUTER}.bias"][: model.config["num_experts_per_tok"]] += 1000.0


CHANGED: dict[str, Callable[[Checkpoint], None]] = {
    "loud channels of 1e4": lambda m: add_loud_channels(m, 1e4),
    "loud channels of 3e5": lambda m: add_loud_channels(m, 3e5),
    "sinks of 50": lambda m: set_sinks(m, 50.0),
    "attention logits x 256": lambda m: scale_attention_logits(m, 256.0),
    "one route": fix_routes,
}


def write_variant(name: str, source: Path, folder: Path) -> Checkpoint:
    """A variant of the model in `source`, written to `folder`."""
    model = Checkpoint.read(source)
    (SAME | CHANGED)[name](model)
    model.write(folder, source)
    return model
