"""Bytes and operations per token for any shape and format, and the speed a GPU's memory and tensor cores allow.

The physical ceiling printed beside every figure comes from here. It counts what must be read once (weights that the
batch touches, KV that its positions see) and assumes nothing is read twice. A measured figure above it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.architectures import GPUS as GPUS
from halfbyte.architectures import Gpu as Gpu
from halfbyte.architectures import gpu_named as gpu_named
from halfbyte.formats import FORMATS
from halfbyte.formats.matrices import Formats
from halfbyte.model.config import ModelConfig
from halfbyte.model.weights import GROUPS, shape_of

_DENSE_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0}
KV_BYTES = {"f32": 4, "bf16": 2, "fp8": 1}


def bytes_per_weight(format: str) -> float:
    if format in _DENSE_BYTES:
        return _DENSE_BYTES[format]
    return FORMATS[format].bits_per_weight / 8


def unique_experts(config: ModelConfig, rows: int) -> float:
    """Expected distinct experts of a layer when `rows` tokens choose uniformly."""
    return config.experts * (1 - (1 - config.top_k / config.experts) ** rows)


def visible(config: ModelConfig, context: int) -> dict[str, int]:
    """Cached positions one query sees, by kind of layer."""
    return {"sliding": min(context, config.window), "full": context}


@dataclass(frozen=True)
class Traffic:
    """Bytes one decode step reads, by part."""

    experts: float
    attention: float  # projections
    lm_head: float
    kv: float
    rest: float

    @property
    def total(self) -> float:
        return self.experts + self.attention + self.lm_head + self.kv + self.rest


def decode_traffic(
    config: ModelConfig,
    formats: Mapping[str, str],
    context: int,
    batch: int = 1,
    kv_dtype: str = "bf16",
    experts_touched: float | None = None,
) -> Traffic:
    """A step that decodes `batch` sequences of `context` tokens each."""
    c = config
    touched = unique_experts(c, batch) if experts_touched is None else experts_touched

    def size(role: str) -> float:
        return _role_bytes(c, formats, role)

    per_expert = (size("gate_up") + size("down")) / c.experts
    biases = (3 * c.hidden + 2 * c.intermediate + c.qkv_dim + c.heads) * 2.0  # norms, biases, sinks: bf16
    positions = visible(c, context)
    kv_token = 2 * c.kv_dim * KV_BYTES[kv_dtype]
    kv = sum(positions[kind] for kind in c.layer_kinds) * kv_token * batch
    return Traffic(
        experts=c.layers * touched * per_expert,
        attention=c.layers * (size("qkv") + size("o")),
        lm_head=size("lm_head"),
        kv=kv,
        rest=c.layers * (biases + c.experts * c.hidden * 2.0) + batch * c.hidden * 2.0,
    )


@dataclass(frozen=True)
class Work:
    """The least one operation must move and compute."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, gpu: Gpu) -> float:
        return max(self.bytes / gpu.read, self.flops / gpu.bf16)

    def bound(self, gpu: Gpu) -> str:
        return "memory" if self.bytes / gpu.read >= self.flops / gpu.bf16 else "compute"


def step_work(
    config: ModelConfig,
    formats: Mapping[str, str],
    sequences: int,
    context: int,
    *,
    new: int = 1,
    logits: int | None = None,
    kv_dtype: str = "bf16",
    experts_touched: float | None = None,
) -> dict[str, Work]:
    """Work of each operation of `plan.phase.OPERATIONS`, over all layers, in one step of `sequences` x `new` rows.

    `context` is a sequence's length with the new rows. An activation counts where one kernel must hand it to the next
    even when norm and product, or rope and cache, are one kernel; what can stay inside a kernel is not counted.
    """
    c = config
    rows = sequences * new
    logit_rows = sequences if logits is None else logits
    touched = unique_experts(c, rows) if experts_touched is None else experts_touched

    def weights(role: str) -> float:
        return _role_bytes(c, formats, role)

    first = context - new
    visible_keys = {
        "full": sum(range(first + 1, context + 1)),
        "sliding": sum(min(c.window, at + 1) for at in range(first, context)),
    }
    cached = {"full": context, "sliding": min(context, c.window + new - 1)}
    pairs = sequences * sum(visible_keys[kind] for kind in c.layer_kinds)
    kv = sequences * sum(cached[kind] for kind in c.layer_kinds) * 2 * c.kv_dim * KV_BYTES[kv_dtype]
    n = float(c.layers)
    half, full = 2.0 * rows, 4.0 * rows  # bytes of one column of activations, and of the residual stream
    return {
        "embed": Work(rows * c.hidden * 2.0 + full * c.hidden),
        "attn_norm": Work(n * full * c.hidden),
        "qkv": Work(n * (weights("qkv") + half * c.qkv_dim), n * 2.0 * rows * c.hidden * c.qkv_dim),
        "rope": Work(n * half * 2 * c.q_dim),
        "kv_write": Work(n * rows * 2 * c.kv_dim * (2.0 + KV_BYTES[kv_dtype])),
        "attention": Work(kv + n * half * 2 * c.q_dim, 4.0 * c.q_dim * pairs),
        "o": Work(n * (weights("o") + half * c.q_dim + 2 * full * c.hidden), n * 2.0 * rows * c.hidden * c.q_dim),
        "mlp_norm": Work(n * full * c.hidden),
        "router": Work(n * (c.experts * c.hidden * 2.0 + half * c.hidden), n * 2.0 * rows * c.hidden * c.experts),
        "moe": Work(
            n * (touched / c.experts * (weights("gate_up") + weights("down")) + half * c.hidden + 2 * full * c.hidden),
            n * 2.0 * rows * c.top_k * 3 * c.hidden * c.intermediate,
        ),
        "final_norm": Work(logit_rows * c.hidden * 4.0),
        "lm_head": Work(weights("lm_head") + logit_rows * c.vocab * 4.0, 2.0 * logit_rows * c.hidden * c.vocab),
    }


def flops_per_token(config: ModelConfig, prompt: int) -> float:
    """Mean matrix operations of one prompt token in a prompt of this length; lm_head is for the last token only."""
    c = config
    dense = 2.0 * c.hidden * (c.qkv_dim + c.q_dim + c.experts)
    moe = 2.0 * c.top_k * 3 * c.hidden * c.intermediate
    seen_full = (prompt + 1) / 2
    w = min(c.window, prompt)
    seen_sliding = (w * (w + 1) / 2 + (prompt - w) * w) / prompt
    attention = sum(4.0 * c.q_dim * (seen_sliding if k == "sliding" else seen_full) for k in c.layer_kinds)
    return c.layers * (dense + moe) + attention


def doubling_depth(config: ModelConfig) -> float:
    """The depth in a prompt at which attention of the full layers takes as many operations as the rest of a row."""
    per_token = sum(4.0 * config.q_dim for kind in config.layer_kinds if kind == "full")
    return flops_per_token(config, 1) / per_token if per_token else math.inf


@dataclass(frozen=True)
class Ceiling:
    tokens_per_second: float
    bound: str  # memory or compute
    bytes: float
    flops: float


def decode_ceiling(
    gpu: Gpu,
    config: ModelConfig,
    formats: Mapping[str, str],
    context: int,
    batch: int = 1,
    kv_dtype: str = "bf16",
    experts_touched: float | None = None,
) -> Ceiling:
    traffic = decode_traffic(config, formats, context, batch, kv_dtype, experts_touched)
    return Ceiling(batch * gpu.read / traffic.total, "memory", traffic.total, 0.0)


HOST_READ = 60e9  # bytes a second of a desktop's memory: two channels of DDR5-5600, two thirds of their peak


def divided_ceiling(
    gpu: Gpu, config: ModelConfig, formats: Mapping[str, str], context: int, host_layers: int, host_read: float
) -> float:
    """Tokens per second of one request whose first layers' experts are in host memory: the GPU reads, then the host."""
    traffic = decode_traffic(config, formats, context)
    host = traffic.experts * host_layers / config.layers
    return 1 / ((traffic.total - host) / gpu.read + host / host_read)


def prefill_ceiling(gpu: Gpu, config: ModelConfig, formats: Mapping[str, str], prompt: int, depth: int = 0) -> Ceiling:
    """bf16 tensor cores against reading every weight once per prompt."""
    c = config
    per_token = flops_per_token(c, prompt) + depth * sum(4.0 * c.q_dim for k in c.layer_kinds if k == "full")
    weights = sum(
        (c.layers if role in ("qkv", "o", "gate_up", "down") else 1) * _role_bytes(c, formats, role) for role in GROUPS
    )
    compute = per_token * prompt / gpu.bf16
    memory = weights / gpu.read
    return Ceiling(prompt / max(compute, memory), "compute" if compute >= memory else "memory", weights, per_token)


def _role_bytes(config: ModelConfig, formats: Mapping[str, str], role: str) -> float:
    """The bytes of one layer's tensor, in the mean of the layers, or of the model's."""
    names = Formats(formats).per_layer(role)
    return math.prod(shape_of(config, role)) * sum(map(bytes_per_weight, names)) / len(names)
