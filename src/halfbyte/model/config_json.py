"""Hugging Face's `config.json`, read as transformers reads it, and written.

Every key is in one of three lists: used (the fields of `ConfigJson` and `RopeJson`), harmless (it changes no logit),
refused (it changes the network in a way that halfbyte does not follow). A key in none of them is a warning. Defaults
are transformers'. Where two keys say the same thing differently, versions of transformers disagree on which one wins,
so the file is refused.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from halfbyte.errors import CheckpointError
from halfbyte.model.config import LayerKind, ModelConfig, Yarn, default_ends
from halfbyte.model.json_records import convert, keys_of, read_json
from halfbyte.model.model_files import not_gpt_oss
from halfbyte.model.plain_file import MIB, quote

NAME = "config.json"
MAX_BYTES = MIB

log = logging.getLogger("halfbyte")


class RopeJson(Struct, frozen=True, kw_only=True):
    """`rope_parameters`, or `rope_scaling` as it was called before."""

    rope_type: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    rope_theta: float | UnsetType = UNSET
    factor: float | UnsetType = UNSET
    original_max_position_embeddings: int | UnsetType = UNSET
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class WrittenByHalfbyte(Struct, frozen=True):
    formats: dict[str, str] = {}


class ConfigJson(Struct, frozen=True, kw_only=True, rename={"name": "_name_or_path"}):
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_local_experts: int | UnsetType = UNSET
    num_experts: int | UnsetType = UNSET
    num_experts_per_tok: int = 4
    experts_per_token: int | None = None
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    sliding_window: int | None = 128
    max_position_embeddings: int = 131072
    original_max_position_embeddings: int | UnsetType = UNSET
    initial_context_length: int | None = None
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | UnsetType = UNSET
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    quantization_config: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None  # MLX's name for it
    halfbyte: WrittenByHalfbyte | None = None
    name: str = ""


USED = keys_of(ConfigJson)
ROPE_USED = keys_of(RopeJson)
# About training, other ways to compute the same, sampling defaults, or labels of tasks that are not generation.
HARMLESS = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "do_sample", "dtype", "id2label",
    "initializer_range", "is_decoder", "label2id", "max_length", "min_length", "name_or_path", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits", "prefix",
    "problem_type", "repetition_penalty", "return_dict", "router_aux_loss_coef", "sep_token_id",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_return_dict", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_experts_implementation",
})  # fmt: skip
ROPE_HARMLESS = frozenset({"finetuned"})
# Key -> the values that change nothing, and what any other value does.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_cross_attention": ((None, False), "adds attention that gpt-oss does not have"),
    "attention_bias": ((True,), "takes away biases that gpt-oss has"),
    "auto_map": ((None,), "names code of its own, which halfbyte never runs"),
    "hidden_act": (("silu",), "is another activation than gpt-oss's"),
    "is_encoder_decoder": ((None, False), "makes it another network"),
    "mlp_bias": ((True,), "takes away biases that gpt-oss has"),
    "partial_rotary_factor": ((None, 1), "rotates only a part of each head"),
    "per_layer_config": ((None,), "makes layers differ in ways that halfbyte does not know"),
    "pruned_heads": ((None, {}), "leaves heads out"),
    "tie_word_embeddings": ((False,), "ties the embeddings, which gpt-oss does not"),
}
ROPE_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "full_attention": ((None,), "gives a kind of layer its own rope"),
    "high_freq_factor": ((None,), "belongs to another rope than gpt-oss's"),
    "long_factor": ((None,), "belongs to another rope than gpt-oss's"),
    "low_freq_factor": ((None,), "belongs to another rope than gpt-oss's"),
    "mrope_section": ((None,), "belongs to another rope than gpt-oss's"),
    "partial_rotary_factor": ((None, 1), "rotates only a part of each head"),
    "short_factor": ((None,), "belongs to another rope than gpt-oss's"),
    "sliding_attention": ((None,), "gives a kind of layer its own rope"),
}
QUANT_METHODS = ("mxfp4", "halfbyte")
# What transformers takes for a gpt-oss without any rope.
ROPE_DEFAULT: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
KINDS: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a config.json: the model, and the formats of the files in its folder."""

    config: ModelConfig
    formats: dict[str, str] = field(default_factory=dict)  # layer group -> format, in folders that halfbyte wrote


def read_config_json(folder: Path) -> ConfigFile:
    path = folder / NAME
    return parse_config(read_json(path, dict[str, Any], MAX_BYTES), where=str(path))


def parse_config(raw: Mapping[str, Any], *, where: str = NAME) -> ConfigFile:
    if raw.get("model_type") != "gpt_oss":
        raise not_gpt_oss(where, dict(raw))
    check_keys(raw, USED, HARMLESS, REFUSED, where)
    j = convert(raw, ConfigJson, where)
    experts = _agree(where, num_local_experts=j.num_local_experts, num_experts=j.num_experts)
    if experts is UNSET:
        raise CheckpointError(f"{where}: the field 'num_local_experts' is missing; fetch it again.")
    top_k = _agree(where, num_experts_per_tok=j.num_experts_per_tok, experts_per_token=j.experts_per_token)
    if j.sliding_window is None:
        raise CheckpointError(f"{where}: sliding_window is null, but gpt-oss has layers with a window.")
    for kind in j.layer_types or ():
        if kind not in KINDS:
            raise CheckpointError(f"{where}: layer type {quote(kind)} is not gpt-oss's ({', '.join(KINDS)}).")
    theta, yarn = _rope(j, where)
    eos = j.eos_token_id
    ends = default_ends(j.vocab_size) if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for id in ends:
        if not 0 <= id < j.vocab_size:
            raise CheckpointError(f"{where}: eos_token_id is {id}, but the vocabulary has {j.vocab_size} tokens.")
    try:
        config = ModelConfig(
            layers=j.num_hidden_layers,
            hidden=j.hidden_size,
            intermediate=j.intermediate_size,
            experts=experts,
            top_k=top_k,
            heads=j.num_attention_heads,
            kv_heads=j.num_attention_heads if j.num_key_value_heads is None else j.num_key_value_heads,
            head_dim=j.hidden_size // max(1, j.num_attention_heads) if j.head_dim is None else j.head_dim,
            vocab=j.vocab_size,
            window=j.sliding_window,
            max_context=j.max_position_embeddings,
            rope_theta=theta,
            yarn=yarn,
            norm_eps=j.rms_norm_eps,
            swiglu_limit=j.swiglu_limit,
            swiglu_alpha=j.swiglu_alpha,
            layer_kinds=tuple(KINDS[kind] for kind in j.layer_types or ()),
            eos_tokens=ends,
            pad_token=ModelConfig.pad_token if j.pad_token_id is None else j.pad_token_id,
            name=j.name or ModelConfig.name,
        )
    except CheckpointError as e:
        raise CheckpointError(f"{where}: {e}") from None
    _check_quantization(j.quantization if j.quantization_config is None else j.quantization_config, where)
    return ConfigFile(config, j.halfbyte.formats if j.halfbyte is not None else {})


def check_keys(
    raw: Mapping[str, Any],
    used: frozenset[str],
    harmless: frozenset[str],
    refused: Mapping[str, tuple[tuple[Any, ...], str]],
    where: str,
) -> None:
    """Refuse keys that halfbyte would have to ignore, and warn of unknown ones."""
    for key in sorted(refused.keys() & raw.keys()):
        allowed, reason = refused[key]
        if raw[key] not in allowed:
            raise CheckpointError(f"{where}: {key} {quote(str(raw[key]))} {reason}, so halfbyte cannot serve it.")
    unknown = sorted(raw.keys() - used - harmless - refused.keys())
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        _warn_once(f"{where}: halfbyte does not know and ignores {', '.join(map(quote, unknown[:8]))}{more}.")


@functools.cache  # a comparison opens the same model for each of its engines
def _warn_once(text: str) -> None:
    log.warning(text)


def _agree(where: str, **values: Any) -> Any:
    """The one value of several keys with the same meaning, or UNSET."""
    pairs = [(name, value) for name, value in values.items() if value is not UNSET and value is not None]
    for name, value in pairs:
        if value != pairs[0][1]:
            raise CheckpointError(f"{where} contradicts itself: {pairs[0][0]} is {pairs[0][1]}, but {name} is {value}.")
    return pairs[0][1] if pairs else UNSET


def _rope(j: ConfigJson, where: str) -> tuple[float, Yarn]:
    raw_ropes = {name: getattr(j, name) for name in ("rope_parameters", "rope_scaling") if getattr(j, name) is not None}
    if not raw_ropes.get("rope_scaling", True):
        del raw_ropes["rope_scaling"]  # {} means none
    ropes = {name: _one_rope(raw, j, f"{where}: {name}") for name, raw in (raw_ropes or {"rope": ROPE_DEFAULT}).items()}
    if len(set(ropes.values())) > 1:
        raise CheckpointError(f"{where} contradicts itself: rope_scaling and rope_parameters differ.")
    return next(iter(ropes.values()))


def _one_rope(raw: dict[str, Any], j: ConfigJson, where: str) -> tuple[float, Yarn]:
    check_keys(raw, ROPE_USED, ROPE_HARMLESS, ROPE_REFUSED, where)
    r = convert(raw, RopeJson, where)
    kind = _agree(where, rope_type=r.rope_type, type=r.type)
    theta = _agree(where, rope_theta=r.rope_theta, **{"rope_theta outside of it": j.rope_theta})
    theta = ModelConfig.rope_theta if theta is UNSET else theta
    if kind in (UNSET, "default"):
        return theta, Yarn(factor=1.0)
    if kind != "yarn":
        raise CheckpointError(f"{where}: rope type {quote(kind)} is not supported; gpt-oss uses yarn.")
    if r.factor is UNSET:
        raise CheckpointError(f"{where}: the field 'factor' is missing; fetch it again.")
    original = _agree(
        where,
        original_max_position_embeddings=r.original_max_position_embeddings,
        **{"original_max_position_embeddings outside of it": j.original_max_position_embeddings},
    )
    if (
        original is UNSET
    ):  # transformers then takes the whole context; OpenAI's own code would take initial_context_length
        original = _agree(
            f"{where} has no original_max_position_embeddings, and the rest",
            max_position_embeddings=j.max_position_embeddings,
            initial_context_length=j.initial_context_length,
        )
    return theta, Yarn(
        factor=r.factor,
        original_context=original,
        beta_fast=r.beta_fast or 32.0,
        beta_slow=r.beta_slow or 1.0,
        truncate=bool(r.truncate),
        attention_factor=_attention_factor(r, r.factor),
    )


def _attention_factor(r: RopeJson, factor: float) -> float | None:
    if r.attention_factor is not None or not (r.mscale and r.mscale_all_dim):
        return r.attention_factor
    if factor <= 1:
        return 1.0
    above, below = (0.1 * scale * math.log(factor) + 1.0 for scale in (r.mscale, r.mscale_all_dim))
    return above / below if below else math.inf  # which the configuration then refuses


def _check_quantization(raw: dict[str, Any] | None, where: str) -> None:
    if raw is None:
        return
    method = raw.get("quant_method")
    if method is None and "group_size" in raw:
        raise CheckpointError(
            f"{where}: the weights are quantised by MLX ({raw.get('bits')} bits in groups of {raw['group_size']}), but"
            " halfbyte reads OpenAI's mxfp4 and GGUF files; get the model that this one was converted from."
        )
    if method is None:
        raise CheckpointError(
            f"{where}: quantization_config has no quant_method; set it to mxfp4 for OpenAI's formats, or remove"
            " quantization_config if the weights are not quantised."
        )
    if method not in QUANT_METHODS:
        named = quote(str(method)) + (f" ({quote(str(raw['format']))})" if "format" in raw else "")
        raise CheckpointError(
            f"{where}: the weights are quantised by {named}, but halfbyte reads OpenAI's mxfp4, GGUF files, and what"
            " `halfbyte quantize` writes; get one of those."
        )


def to_config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers and `parse_config` read as this configuration."""
    rope: dict[str, Any] = {"rope_type": "default"}  # null would be transformers' default, which is yarn
    if not config.yarn.is_plain:
        rope = {
            "rope_type": "yarn",
            "factor": config.yarn.factor,
            "original_max_position_embeddings": config.yarn.original_context,
            "beta_fast": config.yarn.beta_fast,
            "beta_slow": config.yarn.beta_slow,
            "truncate": config.yarn.truncate,
        }
    if config.yarn.attention_factor is not None and not config.yarn.is_plain:
        rope["attention_factor"] = config.yarn.attention_factor
    return {
        "_name_or_path": config.name,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": list(config.eos_tokens) if len(config.eos_tokens) != 1 else config.eos_tokens[0],
        "pad_token_id": config.pad_token,
        "experts_per_token": config.top_k,
        "num_experts_per_tok": config.top_k,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initial_context_length": config.yarn.original_context,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate,
        "layer_types": [f"{kind}_attention" for kind in config.layer_kinds],
        "max_position_embeddings": config.max_context,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.experts,
        "output_router_logits": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "router_aux_loss_coef": 0.9,
        "sliding_window": config.window,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": config.vocab,
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
