"""The batch layer with rope, KV write and attention in one launch (batch.cu) instead of Triton's three.

Preferred to those where the cache is bf16 in pages of 64 tokens; Triton's serve what it refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.attention import batch
from halfbyte.kernels.cuda.attention.batch import AttentionShape, BatchAttention
from halfbyte.kernels.cuda.batch.phase import Attend, BatchLayer
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.launch import Build
from halfbyte.kernels.triton.call import TritonCall
from halfbyte.kernels.triton.rope import angles_call
from halfbyte.kernels.triton.tiles import refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Phase, Spec
from halfbyte.plan.step import Step


def attention_shape(spec: Spec) -> AttentionShape:
    return AttentionShape(spec.heads // spec.kv_heads, spec.kv_heads)


class FusedBatchLayer(BatchLayer):
    name = "cuda.batch_layer_fused"
    backends = {"moe": "cuda", "linear": "cuda", "attention": "cuda"}
    rank = BatchLayer.rank + 1

    def refuse_attention(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_gpu(arch) or batch.refuse(spec)

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        return [*super().builds(spec, arch), batch.build_of(attention_shape(spec))]

    def calls(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        return [angles_call(spec.head_dim // 2)]

    def bind_attention(self, b: Binding) -> Attend:
        assert b.kind is not None
        s, kind, index, (inverse, temperature) = b.spec, b.kind, b.kind_index, b.rope
        device = b.weights.qkv_bias.device
        sinks = b.weights.sinks if "sinks" in s.features_of(("attention",)) else None
        attention = BatchAttention(
            Workspace(gpu(), b.buffers, device),
            attention_shape(s),
            window=s.window if kind == "sliding" else 0,
            sinks=sinks,
            scale=s.head_dim**-0.5,
        )
        if "rope_inverse" not in b.buffers:
            b.buffers["rope_inverse"] = inverse.to(device)
        inverse = b.buffers["rope_inverse"]
        half = s.head_dim // 2

        def attend(step: Step, acts: Activations, qkv: Tensor) -> Tensor:
            if not acts.has("rope_cos"):  # once a step, for every layer
                acts.rope_cos, acts.rope_sin = torch.empty((2, step.rows, half), device=device)
                angles_call(half).launch(
                    (step.rows,),
                    device,
                    positions=step.positions,
                    inverse=inverse,
                    cos=acts.rope_cos,
                    sin=acts.rope_sin,
                    temperature=temperature,
                )
            return attention.run(step, kind, qkv, b.kv_pool(), index, acts.rope_cos, acts.rope_sin)

        return attend


PHASES: tuple[Phase, ...] = (FusedBatchLayer(),)
