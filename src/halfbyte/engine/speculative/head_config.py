"""The config of an EAGLE-3 head, in the two forms in which heads are published.

Flat (NVIDIA's, and those of the first authors): config.json is a Llama layer's, and what concerns the head stands in
`eagle_config`, or beside it:

  eagle_aux_hidden_state_layer_ids   the boundaries whose states are joined; default 2, N/2, N-3
  use_aux_hidden_state false         the target's final hidden state after its norm, no fc
  norm_before_fc, fc_norm            a norm over the joined states, or one over each of them
  norm_before_residual               the layer adds to the state behind its norm, not in front of it
  norm_output                        the next guess is made from the state behind the last norm

Speculators (RedHat's): `speculators_model_type` is eagle3, the layer is in `transformer_layer_config`, which leaves out
what equals the defaults of a Llama config, and the rest stands beside that. Libraries do not agree on what
norm_before_residual means where such a config leaves it out, so it must be there.

Refuses what it does not know in one sentence; it never guesses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.model.config_json import MAX_BYTES
from halfbyte.model.json_records import read_json
from halfbyte.model.plain_file import refusing
from halfbyte.ops.rope import yarn_frequencies

# What a Llama config has where it does not say otherwise.
LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "model_type": "llama"}
HIDDEN_ACTS = ("silu", "swish")


@dataclass(frozen=True)
class HeadConfig:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    boundaries: tuple[int, ...]  # empty: the target's final hidden state, after its norm
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    rope: tuple[Tensor, float]


def read_config(folder: Path, layers: int, hidden: int) -> HeadConfig:
    """The config of a head for a target of so many layers and this hidden size."""
    path = folder / "config.json"
    raw = read_json(path, dict[str, Any], MAX_BYTES)
    with refusing(path):
        return _head_config(raw, folder, layers, hidden)


def _head_config(raw: dict[str, Any], folder: Path, layers: int, hidden: int) -> HeadConfig:
    kind = raw.get("speculators_model_type")
    if kind is None:
        layer, eagle = raw, raw.get("eagle_config") or {}
    elif kind == "eagle3":
        layer, eagle = LLAMA | (raw.get("transformer_layer_config") or {}), {}
        if layer["model_type"] != "llama":
            raise CheckpointError(
                f"{folder} has a layer of {layer['model_type']!r}; EAGLE-3 heads with Llama's are read."
            )
        if "norm_before_residual" not in raw:
            raise CheckpointError(
                f"{folder}: its config does not say norm_before_residual, which is not the same everywhere then; "
                f"write true or false there, as it was trained."
            )
    else:
        raise CheckpointError(f"{folder} is a head of the kind {kind!r}; EAGLE-3 heads are read.")

    def flag(name: str) -> bool:
        value = eagle.get(name, raw.get(name))
        if value not in (None, True, False):
            raise CheckpointError(f"{folder}: {name} is {value!r} in its config, neither true nor false.")
        return bool(value)

    sizes = [size for size in (layer.get("hidden_size"), raw.get("target_hidden_size")) if size not in (None, hidden)]
    if sizes or layer.get("hidden_size") is None:
        size = sizes[0] if sizes else None
        raise CheckpointError(f"{folder} is a head for hidden size {size}, but the model's is {hidden}.")
    if int(layer.get("num_hidden_layers") or 1) != 1:
        raise CheckpointError(f"{folder} has {layer['num_hidden_layers']} layers; EAGLE-3 heads have one.")
    if (act := layer.get("hidden_act") or "silu") not in HIDDEN_ACTS:
        raise CheckpointError(f"{folder}: {act!r} between its products is not known for EAGLE-3 heads (silu).")
    boundaries: tuple[int, ...] = ()
    if kind is not None or eagle.get("use_aux_hidden_state", True):
        named = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
        boundaries = tuple(int(i) for i in named) if named else (2, layers // 2, layers - 3)
    if any(not 0 <= b <= layers for b in boundaries):
        raise CheckpointError(f"{folder} wants the hidden states at {boundaries}, but the model has {layers} layers.")
    heads = int(layer["num_attention_heads"])
    kv_heads = int(layer.get("num_key_value_heads") or heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{folder} has {heads} heads of queries for {kv_heads} of keys, which do not share evenly."
        )
    head_dim = int(layer.get("head_dim") or hidden // heads)
    return HeadConfig(
        hidden, heads, kv_heads, head_dim, float(layer.get("rms_norm_eps", 1e-6)), boundaries,
        norm_before_fc=flag("norm_before_fc"), fc_norm=flag("fc_norm"),
        norm_before_residual=flag("norm_before_residual"), norm_output=flag("norm_output"),
        rope=_rope(layer, folder, head_dim),
    )  # fmt: skip


def _rope(layer: dict[str, Any], folder: Path, head_dim: int) -> tuple[Tensor, float]:
    scaling = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(layer.get("rope_theta") or scaling.get("rope_theta") or 10000.0)
    if kind not in ("default", "yarn"):
        raise CheckpointError(f"{folder}: rope type {kind!r} is not known for EAGLE-3 heads (default, yarn).")
    yarn = scaling if kind == "yarn" else {}
    return yarn_frequencies(
        head_dim, theta, float(yarn.get("factor", 1.0)), int(yarn.get("original_max_position_embeddings", 4096)),
        float(yarn.get("beta_fast", 32.0)), float(yarn.get("beta_slow", 1.0)), bool(yarn.get("truncate", True)),
        yarn.get("attention_factor"),
    )  # fmt: skip
