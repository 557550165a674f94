"""The second norm and the router in Triton: two launches, because the norm is one number per row.

The first multiplies x * norm weight into the router's rows, cut along K over many blocks; the second knows the row's
scale, adds the parts in order, chooses (ties to the lower expert), and writes the normalised row for the experts. A
float32 router, as fine-tunes have it, is multiplied as a sum of two bf16.
"""

from __future__ import annotations

import functools
import math

import torch

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, arch_of, multiple, power_of_two, type_of
from halfbyte.kernels.triton.norm import stored
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import MMA_SYNC, refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

BK = 64
FEW_ROWS = 64  # up to so many, more warps choose for a row (measured on SM90)
PARTS = 9  # of K: five steps each at 2880, because with few rows every step waits for memory


def parts_of(rows: int, hidden: int) -> tuple[int, int]:
    """(parts of K, elements in each). Always the same for one model, so that a choice depends on the row alone."""
    steps = math.ceil(hidden / BK)
    steps_per_part = math.ceil(steps / PARTS)
    return math.ceil(steps / steps_per_part), steps_per_part * BK


def rows_step(rows: int, arch: Arch, weight: torch.dtype) -> int:
    """Rows of a block: with many, the router's weights are read less often. The sums are the same bits either way.

    64 need a warpgroup's product; SM8x and SM12x have none, and spill, with float32 weights already from 32 on."""
    if arch.family in MMA_SYNC:
        return 16 if rows < 1024 or weight == torch.float32 else 32
    return 16 if rows < 1024 else 64


def experts_step(rows: int) -> int:
    """Few rows: more blocks share the router's rows. Many: a block sees all experts, so that x is read once."""
    return 32 if rows <= 64 else 128


def router_call(
    x: torch.dtype, norm: torch.dtype, weight: torch.dtype, rows: int, hidden: int, experts: int, arch: Arch,
    tile_rows: int | None = None,
) -> TritonCall:  # fmt: skip
    tile_rows = tile_rows or rows
    bm, be = rows_step(tile_rows, arch, weight), experts_step(tile_rows)
    return _router_call(x, norm, weight, multiple(rows), hidden, experts, bm, be)


@functools.cache  # kept, so that a launch need not look for its kernel
def _router_call(
    x: torch.dtype, norm: torch.dtype, weight: torch.dtype, rows: str, hidden: int, experts: int, bm: int, be: int
) -> TritonCall:
    types = {
        "x": type_of(x), "norm": type_of(norm), "weight": type_of(weight), "partial": "*fp32", "M": rows,
        "H": multiple(hidden), "E": multiple(experts), "CHUNK": multiple(parts_of(1, hidden)[1]),
    }  # fmt: skip
    return TritonCall(
        "rows",
        "router_kernel",
        types,
        {"BM": bm, "BE": be, "BK": BK},
        warps=4,
        stages=3,
        need=r"\b(HMMA|HGMMA|UTCHMMA)",
    )


def choose_call(
    x: torch.dtype, norm: torch.dtype, bias: torch.dtype, h: torch.dtype, rows: int, spec: Spec
) -> TritonCall:
    warps = 8 if rows <= FEW_ROWS else 2  # many hide their waits
    return _choose_call(x, norm, bias, h, warps, spec.hidden, spec.experts, spec.top_k)


@functools.cache
def _choose_call(
    x: torch.dtype, norm: torch.dtype, bias: torch.dtype, h: torch.dtype, warps: int, hidden: int, experts: int,
    top_k: int,
) -> TritonCall:  # fmt: skip
    types = {
        "x": type_of(x), "norm": type_of(norm), "bias": type_of(bias), "partial": "*fp32", "h": type_of(h),
        "ids": "*i32", "weights": "*fp32", "H": multiple(hidden), "E": multiple(experts), "eps": "fp32",
    }  # fmt: skip
    constants = {
        "PARTS": parts_of(1, hidden)[0],
        "TOP": top_k,
        "TOP_P2": power_of_two(top_k),
        "BH": power_of_two(hidden),
        "BE": power_of_two(experts),
    }
    return TritonCall("rows", "choose_kernel", types, constants, warps=warps)


class NormAndRouter(TritonPhase):
    name, covers, category, rank = "triton.mlp_norm_router", ("mlp_norm", "router"), "router", 10
    knows = frozenset({"bias"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.experts > 1024:
            return f"chooses among 1024 experts at most, not {spec.experts}"
        return refuse_gpu(arch)

    def bind(self, b: Binding) -> Launch:
        spec, w = b.spec, b.weights
        dtype = stored(spec, "gate_up")
        parts, chunk = parts_of(1, spec.hidden)
        arch = arch_of(w.router.device)

        def launch(step: Step, acts: Activations) -> None:
            x, rows = acts.x, step.rows
            device = x.device
            partial = torch.empty((rows, parts, spec.experts), dtype=torch.float32, device=device)
            call = router_call(
                x.dtype, w.mlp_norm.dtype, w.router.dtype, rows, spec.hidden, spec.experts, arch, step.tile_rows
            )
            bm, be = call.constants["BM"], call.constants["BE"]
            call.launch(
                (math.ceil(rows / bm), math.ceil(spec.experts / be), parts), device,
                x=x, norm=w.mlp_norm, weight=w.router, partial=partial,
                M=rows, H=spec.hidden, E=spec.experts, CHUNK=chunk,
            )  # fmt: skip
            h = torch.empty((rows, spec.hidden), dtype=dtype, device=device)
            ids = torch.empty((rows, spec.top_k), dtype=torch.int32, device=device)
            weights = torch.empty((rows, spec.top_k), dtype=torch.float32, device=device)
            tile_rows = step.tile_rows or rows
            choose_call(x.dtype, w.mlp_norm.dtype, w.router_bias.dtype, dtype, tile_rows, spec).launch(
                (rows,), device, x=x, norm=w.mlp_norm, bias=w.router_bias, partial=partial, h=h, ids=ids,
                weights=weights, H=spec.hidden, E=spec.experts, eps=spec.norm_eps,
            )  # fmt: skip
            acts.h, acts.topk_ids, acts.topk_weights = h, ids, weights

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        f32 = torch.float32
        norm, weight, bias = (
            f32 if role in spec.wide else torch.bfloat16 for role in ("mlp_norm", "router", "router_bias")
        )
        return [
            *(router_call(f32, norm, weight, rows, spec.hidden, spec.experts, arch) for rows in (16, 2048)),
            choose_call(f32, norm, bias, stored(spec, "gate_up"), 16, spec),
            choose_call(f32, norm, bias, stored(spec, "gate_up"), 2048, spec),
        ]
