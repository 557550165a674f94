"""One matrix of a batch of 2 to 128 rows, or a stack of experts', with the build that multiplies it (product.cu).

A `Matrix` is weights in the layout "tile16". Nothing here synchronises with the host, allocates in a step or looks at
device data, so a step can be captured. Weights are never converted: a wrong layout or shape is a PlanError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.tile16 import tile_shape
from halfbyte.kernels.cuda.batch.builds import COLUMNS_MAX, BatchProductArgs, ProductShape, StageArgs, product_build
from halfbyte.kernels.cuda.device.host import FORMATS, KernelMachine, is_float_vector, pointer


@dataclass(frozen=True)
class RouterParts:
    """What o's product leaves of the router: parts of its products with norm weight times the new residual."""

    weight: Tensor  # as `tile_router` makes it
    norm: Tensor
    logits: Tensor


def tile_router(w: Tensor) -> Tensor:
    """bf16 [experts, hidden] as a warp reads it: [16 k][16 experts][lane (g, t)][expert g or g + 8][k 4 t ..]."""
    if w.dtype != torch.bfloat16:
        raise PlanError("the batch products read the router in bf16.")
    experts, hidden = w.shape
    return w.view(experts // 16, 2, 8, hidden // 16, 4, 4).permute(3, 0, 2, 4, 1, 5).contiguous()


class BatchMatrix:
    """One matrix, or a stack of experts', with its bias."""

    def __init__(
        self,
        w: MXTensor | DenseTiles,
        bias: Tensor | None,
        role: str,
        *,
        swiglu: bool = False,
        router: int = 0,
        shared: int = 232_448,
    ) -> None:
        form = "bf16" if isinstance(w, DenseTiles) else str(getattr(w, "format", "plain"))
        if getattr(w, "layout", "plain") != "tile16" or form not in FORMATS:
            raise PlanError(f"the batch products need {role} in the layout tile16, as mxfp4, q8 or bf16.")
        self.n, self.k = w.shape[-2:]
        if self.n % 16 or self.k % 64:
            raise PlanError(f"the batch products need {role} in multiples of 16 x 64, not {self.n} x {self.k}.")
        assert tuple(w.data.shape[-3:]) == tile_shape(self.n, self.k, form), f"{role} is not what its shape says"
        assert w.data.is_contiguous(), f"{role} is not whole"
        self.data, self.bias = w.data, bias
        self.shape = ProductShape(form, self.k, swiglu, ids=w.data.ndim == 4, router=router).within(shared)
        if self.shape.shared_bytes > shared:
            raise PlanError(f"a tile of {role} in {form} does not fit in {shared} bytes of shared memory.")
        self.experts = w.data.shape[0] if w.data.ndim == 4 else 1
        self._bias_float = is_float_vector(bias)

    def stage(self, x: Tensor, out: Tensor, share: int) -> StageArgs:
        assert x.dtype == torch.bfloat16, "activations are bf16"
        assert x.is_contiguous(), "rows of x are whole"
        return StageArgs(
            weights=pointer(self.data),
            bias=pointer(self.bias),
            x=pointer(x),
            out=pointer(out),
            tiles=self.n // 16,
            share=share,
            bias_float=self._bias_float,
        )

    def run(
        self,
        machine: KernelMachine,
        x: Tensor,
        out: Tensor,
        columns: int,
        *,
        residual: Tensor | None = None,
        ids: Tensor | None = None,
        tickets: int | None = None,
        share: int = 1,
        router: RouterParts | None = None,
        early: bool = True,
        limit: float = 0.0,
        alpha: float = 0.0,
        trace: Tensor | None = None,
    ) -> None:
        """out[c] = W x[c / share] + bias (+ residual[c]), W that of expert ids[c]."""
        assert columns <= COLUMNS_MAX, "too many columns"
        assert (ids is not None) == self.shape.ids, "columns choose among a stack of matrices"
        args = BatchProductArgs(
            stage=(StageArgs * 2)(self.stage(x, out, share)),
            residual=pointer(residual),
            ids=pointer(ids),
            tickets=tickets,
            trace=pointer(trace),
            columns=columns,
            experts=self.experts,
            early=int(early),
            limit=limit,
            alpha=alpha,
        )
        assert (router.weight.shape[1] * 16 if router else 0) == self.shape.router, "the router it was made for"
        if router:
            args.router, args.norm, args.logits = map(pointer, (router.weight, router.norm, router.logits))
            args.norm_float = is_float_vector(router.norm)
        machine.run(product_build(self.shape), machine.blocks, args)
