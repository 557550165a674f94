"""Hugging Face's GptOssForCausalLM as an oracle, and its weights as ours."""

from __future__ import annotations

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from halfbyte import formats
from halfbyte.model.config import ModelConfig
from halfbyte.model.config_json import to_config_json
from halfbyte.model.weights import LayerWeights, Weights


def hf_model(config: ModelConfig, seed: int) -> GptOssForCausalLM:
    raw = to_config_json(config)
    raw.pop("quantization_config")
    raw.pop("torch_dtype")
    hf_config = GptOssConfig(**raw, attn_implementation="eager")
    torch.manual_seed(seed)
    model = GptOssForCausalLM(hf_config).eval().float()
    with torch.no_grad():  # HF initialises biases, sinks and norms to constants; give each a life of its own
        for name, p in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "router" in name:
                p.normal_(0, 0.5)
            elif "norm" in name:
                p.uniform_(0.5, 1.5)
            elif "embed" in name:
                p.normal_(0, 1.0)  # tokens must differ, or greedy decoding repeats one of them
            else:
                p.normal_(0, 0.08)
    return model


def our_weights(config: ModelConfig, model: GptOssForCausalLM, *, mxfp4_experts: bool = False) -> Weights:
    """The same weights. With `mxfp4_experts`, HF's experts are overwritten with the values MXFP4 can hold."""
    layers = []
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        experts = {}
        for role, p in (("gate_up", m.experts.gate_up_proj), ("down", m.experts.down_proj)):
            ours = p.detach().transpose(1, 2).contiguous()
            if mxfp4_experts:
                q = formats.quantize(ours, "mxfp4")
                p.data.copy_(formats.dequantize(q, torch.float32).transpose(1, 2))
                experts[role] = q
            else:
                experts[role] = ours
        layers.append(
            LayerWeights(
                attn_norm=layer.input_layernorm.weight.detach(),
                qkv=torch.cat([p.weight for p in (a.q_proj, a.k_proj, a.v_proj)]).detach(),
                qkv_bias=torch.cat([p.bias for p in (a.q_proj, a.k_proj, a.v_proj)]).detach(),
                sinks=a.sinks.detach(),
                o=a.o_proj.weight.detach(),
                o_bias=a.o_proj.bias.detach(),
                mlp_norm=layer.post_attention_layernorm.weight.detach(),
                router=m.router.weight.detach(),
                router_bias=m.router.bias.detach(),
                gate_up_bias=m.experts.gate_up_proj_bias.detach(),
                down_bias=m.experts.down_proj_bias.detach(),
                **experts,
            )
        )
    return Weights(
        config=config,
        embed=model.model.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=model.model.norm.weight.detach(),
        lm_head=model.lm_head.weight.detach(),
    )
