"""Rope (yarn) and the KV write in one kernel; cos and sin are made once a step, by the first layer that asks."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, arch_of, multiple, power_of_two, type_of
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import OTHER
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

KV_TYPES = {"bf16": torch.bfloat16, "fp8": torch.uint8}


def refuse_cache(spec: Spec) -> str | None:
    """What rope, the write and attention ask of heads and pages alike."""
    if spec.head_dim & (spec.head_dim - 1) or not 16 <= spec.head_dim <= 128:
        return f"needs a head_dim that is a power of two from 16 to 128, not {spec.head_dim}"
    if spec.page_size & (spec.page_size - 1) or not 16 <= spec.page_size <= 128:
        return f"needs a page of 16 to 128 positions, a power of two, not {spec.page_size}"
    group = spec.heads // spec.kv_heads
    if group > 16 or group & (group - 1):
        return f"packs the query heads of a kv head into a tile: 1, 2, 4, 8 or 16 of them, not {group}"
    if spec.kv_dtype not in KV_TYPES:
        return f"keeps the cache in bf16 or fp8, not {spec.kv_dtype}"
    return None


def as_stored(pool: Tensor) -> Tensor:
    """fp8 pages as bytes: the kernels convert themselves."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def angles_call(half: int) -> TritonCall:
    types = {"positions": "*i32", "inverse": "*fp32", "cos": "*fp32", "sin": "*fp32", "temperature": "fp32"}
    return TritonCall("rows", "angles_kernel", types, {"HALF": half}, warps=1, part=OTHER)


def cache_format(spec: Spec, arch: Arch) -> str:
    """The format of the cache as kernels name it: fp8_bits is fp8 where E4M3 has to be made of integers."""
    return "fp8_bits" if spec.kv_dtype == "fp8" and "e4m3" not in arch.features else spec.kv_dtype


def rope_call(spec: Spec, arch: Arch, q: torch.dtype, strides: tuple[int, int], table_stride: int) -> TritonCall:
    group, d = spec.heads // spec.kv_heads, spec.head_dim
    pool = type_of(KV_TYPES[spec.kv_dtype])
    types = {
        "q": type_of(q),
        "k": type_of(q),
        "v": type_of(q),
        "cos": "*fp32",
        "sin": "*fp32",
        "positions": "*i32",
        "sequence_of": "*i32",
        "table": "*i32",
        "pool": pool,
        "rotated": "*bf16",
        "q_stride": multiple(strides[0]),
        "k_stride": multiple(strides[1]),
        "v_stride": multiple(strides[1]),
        "table_stride": multiple(table_stride),
        "page_stride": "i32:16",
        "layer_offset": "i32:16",
        "value_offset": "i32:16",
    }
    constants = {
        "KV": cache_format(spec, arch),
        "GROUP": group,
        "GROUP_P2": power_of_two(group),
        "HALF": d // 2,
        "PAGE": spec.page_size,
    }
    return TritonCall("rows", "rope_kernel", types, constants, warps=1)


class RopeAndWrite(TritonPhase):
    name, covers, category, rank = "triton.rope_kv_write", ("rope", "kv_write"), "attention", 10
    knows = frozenset({"yarn"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_gpu(arch) or refuse_cache(spec)

    def bind(self, b: Binding) -> Launch:
        assert b.kind is not None
        spec, kind, index, temperature = b.spec, b.kind, b.kind_index, b.rope[1]
        inverse = b.buffers.get("rope_inverse")
        if inverse is None:
            inverse = b.buffers["rope_inverse"] = b.rope[0].to(b.weights.qkv_bias.device)
        half, d = spec.head_dim // 2, spec.head_dim
        angles = angles_call(half)

        def launch(step: Step, acts: Activations) -> None:
            q, k, v = acts.q, acts.k, acts.v
            device, rows = q.device, step.rows
            if not acts.has("rope_cos"):
                acts.rope_cos, acts.rope_sin = torch.empty((2, rows, half), dtype=torch.float32, device=device)
                angles.launch(
                    (rows,),
                    device,
                    positions=step.positions,
                    inverse=inverse,
                    cos=acts.rope_cos,
                    sin=acts.rope_sin,
                    temperature=temperature,
                )
            pool, table = as_stored(b.kv_pool()), step.block_tables[kind]
            rotated = torch.empty((rows, spec.heads, d), dtype=torch.bfloat16, device=device)
            call = rope_call(spec, arch_of(device), q.dtype, (q.stride(0), k.stride(0)), table.stride(0))
            call.launch(
                (rows, spec.kv_heads),
                device,
                q=q,
                k=k,
                v=v,
                cos=acts.rope_cos,
                sin=acts.rope_sin,
                positions=step.positions,
                sequence_of=step.row_sequence,
                table=table,
                pool=pool,
                rotated=rotated,
                q_stride=q.stride(0),
                k_stride=k.stride(0),
                v_stride=v.stride(0),
                table_stride=table.stride(0),
                page_stride=pool.stride(0),
                layer_offset=index * pool.stride(1),
                value_offset=pool.stride(2),
            )
            acts.q = rotated

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        stride = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        return [angles_call(spec.head_dim // 2), rope_call(spec, arch, torch.float32, (stride, stride), 16)]
