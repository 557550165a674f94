"""Heads of EAGLE-3 for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfbyte.model.gpt_oss import GptOss


def write_head(folder: Path, target: GptOss, *, seed: int = 0, aux: bool = True, own_vocab: int | None = 300,
               ids: tuple[int, ...] = (1, 2, 4), prefix: str = "midlayer.", speculators: bool = False,
               own_embedding: bool = False, flags: tuple[str, ...] = (), **config) -> Path:  # fmt: skip
    """A random head as they are published: in the flat layout, with `eagle_config`, or in that of speculators, where a
    layer's config leaves out what a Llama config has by itself. `flags` are true in it."""
    folder.mkdir(parents=True, exist_ok=True)
    g = torch.Generator().manual_seed(seed)
    H, heads, kv, dim, inner = target.config.hidden, 4, 2, 16, 96

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=g) / columns**0.5).bfloat16()

    def norm(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=g)).bfloat16()

    tensors = {
        f"{prefix}self_attn.q_proj.weight": matrix(heads * dim, 2 * H),
        f"{prefix}self_attn.k_proj.weight": matrix(kv * dim, 2 * H),
        f"{prefix}self_attn.v_proj.weight": matrix(kv * dim, 2 * H),
        f"{prefix}self_attn.o_proj.weight": matrix(H, heads * dim),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, H), f"{prefix}mlp.up_proj.weight": matrix(inner, H),
        f"{prefix}mlp.down_proj.weight": matrix(H, inner), f"{prefix}input_layernorm.weight": norm(H),
        f"{prefix}hidden_norm.weight": norm(H), f"{prefix}post_attention_layernorm.weight": norm(H),
        "norm.weight": norm(H),
    }  # fmt: skip
    eagle: dict[str, object] = {"use_aux_hidden_state": aux}
    if aux:
        tensors["fc.weight"] = matrix(H, len(ids) * H)
        eagle["eagle_aux_hidden_state_layer_ids"] = list(ids)
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = norm(len(ids) * H)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": norm(H) for i in range(len(ids))}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(target.config.vocab, H)
    if own_vocab is not None:
        kept = torch.randperm(target.config.vocab, generator=g)[:own_vocab].sort().values
        tensors["lm_head.weight"] = matrix(own_vocab, H)
        tensors["d2t"] = kept - torch.arange(own_vocab)
        tensors["t2d"] = torch.zeros(target.config.vocab, dtype=torch.bool).index_fill(0, kept, True)
    save_file(tensors, folder / "model.safetensors")
    layer = {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv,
             "head_dim": dim, "rms_norm_eps": 1e-5}  # fmt: skip
    truths = dict.fromkeys(flags, True)
    raw: dict[str, object]
    if speculators:
        raw = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False,
            "draft_vocab_size": own_vocab, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": list(ids),
            "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": {"model_type": "llama", **layer},
            **truths, **config,
        }  # fmt: skip
    else:
        raw = {**layer, "rope_theta": 10000.0, "eagle_config": eagle | truths, **config}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
