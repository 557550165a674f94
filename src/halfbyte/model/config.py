"""The shape of a gpt-oss model, read from a Hugging Face `config.json` or given by name.

Refuses any other architecture, and any value the network in `gpt_oss.py` would have to ignore.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from halfbyte.errors import CheckpointError

LayerKind = Literal["sliding", "full"]


@dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling. `factor` 1 means plain rope."""

    factor: float = 32.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int = 128
    max_context: int = 131072
    rope_theta: float = 150000.0
    yarn: Yarn = Yarn()
    norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    layer_kinds: tuple[LayerKind, ...] = ()
    eos_tokens: tuple[int, ...] = (200002,)
    pad_token: int = 199999
    name: str = "gpt-oss"

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            object.__setattr__(
                self, "layer_kinds", tuple("sliding" if i % 2 == 0 else "full" for i in range(self.layers))
            )
        problems = []
        if len(self.layer_kinds) != self.layers:
            problems.append(f"layer_types has {len(self.layer_kinds)} entries for {self.layers} layers")
        if self.heads % self.kv_heads:
            problems.append(f"{self.heads} query heads do not divide over {self.kv_heads} kv heads")
        if self.top_k > self.experts:
            problems.append(f"top-{self.top_k} of {self.experts} experts")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd")
        if min(self.layers, self.hidden, self.intermediate, self.experts, self.vocab, self.window) < 1:
            problems.append("a size is below 1")
        if problems:
            raise CheckpointError(f"not a usable gpt-oss configuration: {'; '.join(problems)}.")

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        return self.q_dim + 2 * self.kv_dim

    def kind_index(self, layer: int) -> int:
        """Position of `layer` among the layers of its own kind: its place inside a KV page."""
        return self.layer_kinds[:layer].count(self.layer_kinds[layer])

    def kind_count(self, kind: LayerKind) -> int:
        return self.layer_kinds.count(kind)

    @property
    def layers_per_page(self) -> int:
        """A KV page holds the layers of one kind, whichever it is."""
        return max(self.kind_count("sliding"), self.kind_count("full"))

    def with_(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    # ---- Hugging Face config.json -------------------------------------------------------------

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, where: str = "config.json") -> ModelConfig:
        kind = raw.get("model_type")
        if kind != "gpt_oss":
            raise CheckpointError(f"{where}: model_type is {kind!r}, but halfbyte serves gpt_oss models only.")
        try:
            layers = int(raw["num_hidden_layers"])
            types = raw.get("layer_types")
            rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
            rope_type = rope.get("rope_type", rope.get("type", "default"))
            if rope_type not in ("yarn", "default"):
                raise CheckpointError(f"{where}: rope type {rope_type!r} is not supported; gpt-oss uses yarn.")
            theta = float(raw.get("rope_theta") or rope.get("rope_theta") or 150000.0)
            yarn = (
                Yarn(
                    factor=float(rope["factor"]),
                    original_context=int(
                        rope.get("original_max_position_embeddings") or raw.get("initial_context_length") or 4096
                    ),
                    beta_fast=float(rope.get("beta_fast") or 32.0),
                    beta_slow=float(rope.get("beta_slow") or 1.0),
                    truncate=bool(rope.get("truncate", True)),
                )
                if rope_type == "yarn"
                else Yarn(factor=1.0)
            )
            if raw.get("hidden_act", "silu") != "silu":
                raise CheckpointError(f"{where}: hidden_act {raw['hidden_act']!r} is not gpt-oss's.")
            if raw.get("tie_word_embeddings"):
                raise CheckpointError(f"{where}: tied embeddings are not part of gpt-oss.")
            if raw.get("attention_bias") is False:
                raise CheckpointError(f"{where}: attention_bias false is not gpt-oss's.")
            eos = raw.get("eos_token_id", 200002)
            heads = int(raw["num_attention_heads"])
            return cls(
                layers=layers,
                hidden=int(raw["hidden_size"]),
                intermediate=int(raw["intermediate_size"]),
                experts=int(raw.get("num_local_experts") or raw["num_experts"]),
                top_k=int(raw.get("num_experts_per_tok") or raw.get("experts_per_token") or 4),
                heads=heads,
                kv_heads=int(raw.get("num_key_value_heads") or heads),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
                vocab=int(raw["vocab_size"]),
                window=int(raw.get("sliding_window") or 128),
                max_context=int(raw.get("max_position_embeddings") or 131072),
                rope_theta=theta,
                yarn=yarn,
                norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
                swiglu_limit=float(raw.get("swiglu_limit") or 7.0),
                layer_kinds=tuple(_kind(t, where) for t in types) if types else (),
                eos_tokens=tuple(eos) if isinstance(eos, list) else (int(eos),),
                pad_token=199999 if raw.get("pad_token_id") is None else int(raw["pad_token_id"]),
                name=str(raw.get("_name_or_path") or "gpt-oss"),
            )
        except KeyError as e:
            raise CheckpointError(f"{where}: the field {e.args[0]!r} is missing; is the download complete?") from None
        except (TypeError, ValueError) as e:
            raise CheckpointError(f"{where}: a field has an unusable value ({e}).") from None

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; give a Hugging Face model folder, or a .gguf file."
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise CheckpointError(f"{path} cannot be read ({e}); fetch it again.") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} is not a JSON object; fetch it again.")
        return cls.from_hf(raw, where=str(path))

    def to_hf(self) -> dict[str, Any]:
        rope = {
            "rope_type": "yarn",
            "factor": self.yarn.factor,
            "original_max_position_embeddings": self.yarn.original_context,
            "beta_fast": self.yarn.beta_fast,
            "beta_slow": self.yarn.beta_slow,
            "truncate": self.yarn.truncate,
        }
        return {
            "_name_or_path": self.name,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": list(self.eos_tokens) if len(self.eos_tokens) > 1 else self.eos_tokens[0],
            "pad_token_id": self.pad_token,
            "experts_per_token": self.top_k,
            "num_experts_per_tok": self.top_k,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initial_context_length": self.yarn.original_context,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_types": [f"{k}_attention" for k in self.layer_kinds],
            "max_position_embeddings": self.max_context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "output_router_logits": False,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope if self.yarn.factor != 1.0 else None,
            "router_aux_loss_coef": 0.9,
            "sliding_window": self.window,
            "swiglu_limit": self.swiglu_limit,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
        }

    def summary(self) -> dict[str, Any]:
        return asdict(self)


def _kind(hf: str, where: str) -> LayerKind:
    if hf == "sliding_attention":
        return "sliding"
    if hf == "full_attention":
        return "full"
    raise CheckpointError(f"{where}: layer type {hf!r} is not gpt-oss's (sliding_attention, full_attention).")


def _gpt_oss(name: str, layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=2880, intermediate=2880, experts=experts, top_k=4,
        heads=64, kv_heads=8, head_dim=64, vocab=201088, name=name,
    )  # fmt: skip


# The true shapes, and a small one whose every dimension differs from every other.
NAMED: dict[str, ModelConfig] = {
    "120b": _gpt_oss("gpt-oss-120b", 36, 128),
    "20b": _gpt_oss("gpt-oss-20b", 24, 32),
    "small": ModelConfig(
        layers=4, hidden=256, intermediate=192, experts=8, top_k=4, heads=8, kv_heads=2, head_dim=32,
        vocab=1024, max_context=8192, yarn=Yarn(factor=8.0, original_context=256),
        eos_tokens=(1,), pad_token=0, name="small",
    ),
}  # fmt: skip
