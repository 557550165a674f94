"""One layer of a batch but for attention, and the head: the kernels of a batch in order, over buffers all layers share.

`Layer` runs a layer's matrices with the norms, the router and the sums between them. Nothing here synchronises with the
host or looks at device data, so a step can be captured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.kernels.cuda.batch.builds import (
    COLUMNS_MAX,
    ROWS_MAX,
    BatchProductArgs,
    BatchRowsArgs,
    RowShape,
    StageArgs,
    product_build,
    rows_build,
)
from halfbyte.kernels.cuda.batch.products import BatchMatrix, RouterParts, tile_router
from halfbyte.kernels.cuda.device.host import KernelMachine, Workspace, is_float_vector, pointer


class BatchExperts:
    """gate_up and down of all experts. One launch where both are as deep (gpt-oss), else two."""

    def __init__(self, gate_up: BatchMatrix, down: BatchMatrix, limit: float, alpha: float) -> None:
        self.gate_up, self.down, self.limit, self.alpha = gate_up, down, limit, alpha
        one, other = gate_up.shape, down.shape
        self.both = replace(one, both=True) if (one.format, one.k) == (other.format, other.k) else None

    def run(self, machine: KernelMachine, buffers: BatchBuffers, rows: int, *, trace: Tensor | None = None) -> None:
        """buffers.h through the experts of buffers.ids into buffers.hidden and buffers.parts."""
        share = buffers.shape.top_k
        columns = rows * share
        assert columns <= COLUMNS_MAX, "too many columns"
        tickets = buffers.tickets.data_ptr()
        if self.both is None:
            self.gate_up.run(
                machine,
                buffers.h,
                buffers.hidden,
                columns,
                ids=buffers.ids,
                tickets=tickets,
                share=share,
                early=False,
                limit=self.limit,
                alpha=self.alpha,
                trace=trace,
            )
            self.down.run(
                machine, buffers.hidden, buffers.parts, columns, ids=buffers.ids, tickets=tickets + 4, trace=trace
            )
            return
        stages = self.gate_up.stage(buffers.h, buffers.hidden, share), self.down.stage(buffers.hidden, buffers.parts, 1)
        args = BatchProductArgs(
            stage=(StageArgs * 2)(*stages),
            ids=pointer(buffers.ids),
            tickets=tickets,
            done=pointer(buffers.done),
            failure=pointer(machine.failure),
            trace=pointer(trace),
            columns=columns,
            experts=self.down.experts,
            limit=self.limit,
            alpha=self.alpha,
        )
        machine.run(product_build(self.both), machine.blocks, args)


class BatchBuffers:
    """What one step needs besides weights, shared by all layers and never replaced: a captured graph may hold it."""

    def __init__(self, workspace: Workspace, shape: RowShape, inner: int) -> None:
        self.machine, self.shape = workspace.machine, shape
        choices = ROWS_MAX * shape.top_k

        def get(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return workspace.fixed(f"batch.{name}", *size, dtype=dtype)

        self.h = get("h", ROWS_MAX, shape.hidden, dtype=torch.bfloat16)
        self.hidden = get("hidden", choices, inner, dtype=torch.bfloat16)
        self.parts = get("parts", choices, shape.hidden)
        self.logits = get("logits", shape.parts * ROWS_MAX, shape.experts)
        self.weights = get("weights", ROWS_MAX, shape.top_k)
        self.ids = get("ids", ROWS_MAX, shape.top_k, dtype=torch.int32)
        self.tickets = get("tickets", 2, dtype=torch.int32)
        self.done = get("done", choices, dtype=torch.int32)

    def run(self, entry: str, args: BatchRowsArgs) -> None:
        """One of the kernels between the products."""
        self.machine.run(rows_build(self.shape, entry), args.rows, args)


class LayerKernels:
    """One layer but for attention: `enter` gives q, k and v of all rows, `leave` takes what attention made of them."""

    def __init__(
        self,
        buffers: BatchBuffers,
        *,
        qkv: BatchMatrix,
        o: BatchMatrix,
        gate_up: BatchMatrix,
        down: BatchMatrix,
        attn_norm: Tensor,
        mlp_norm: Tensor,
        router: Tensor,
        router_bias: Tensor,
        eps: float,
        limit: float,
        alpha: float,
    ) -> None:
        self.machine, self.buffers = buffers.machine, buffers
        self.qkv, self.o, self.experts = qkv, o, BatchExperts(gate_up, down, limit, alpha)
        self.router = RouterParts(tile_router(router), mlp_norm, buffers.logits)
        self.attn_norm, self.router_bias, self.eps = attn_norm, router_bias, eps
        for vector in (attn_norm, mlp_norm, router_bias):
            is_float_vector(vector)

    def _rows(self, x: Tensor, norm: Tensor | None) -> BatchRowsArgs:
        assert x.dtype == torch.float32, "the residual is float32"
        assert x.is_contiguous(), "rows of the residual are whole"
        r = self.buffers
        return BatchRowsArgs(
            x=pointer(x),
            weights=pointer(r.weights),
            ids=pointer(r.ids),
            norm=pointer(norm),
            h=pointer(r.h),
            rows=x.shape[0],
            norm_float=is_float_vector(norm),
            eps=self.eps,
        )

    def sum_up(self, x: Tensor, norm: Tensor | None, *, pending: bool) -> None:
        """The experts' results of the layer before into x, in place, and the norm of that."""
        args = self._rows(x, norm)
        args.parts = pointer(self.buffers.parts) if pending else None
        self.buffers.run("batch_finish", args)

    def choose(self, x: Tensor) -> None:
        """Experts and their weights, from what o has left of the router, and the norm in front of them."""
        r, args = self.buffers, self._rows(x, self.router.norm)
        args.router_bias, args.bias_float = pointer(self.router_bias), is_float_vector(self.router_bias)
        args.logits, args.tickets, args.done = map(pointer, (r.logits, r.tickets, r.done))
        r.run("batch_choose", args)

    def enter(self, x: Tensor, out: Tensor, *, pending: bool) -> None:
        """`pending`: the layer before has left its experts' results to be added to x."""
        self.sum_up(x, self.attn_norm, pending=pending)
        self.qkv.run(self.machine, self.buffers.h, out, x.shape[0])

    def leave(self, x: Tensor, attn: Tensor) -> None:
        """x + o(attn) in place, and the experts' results of that, which the next layer or `finish` adds."""
        self.o.run(self.machine, attn, x, x.shape[0], residual=x, router=self.router)
        self.choose(x)
        self.experts.run(self.machine, self.buffers, x.shape[0])

    def finish(self, x: Tensor) -> None:
        """After the last layer: its experts' results, in place."""
        self.sum_up(x, None, pending=True)


class Head:
    """The last norm and lm_head, for up to eight rows."""

    def __init__(self, buffers: BatchBuffers, lm_head: BatchMatrix, norm: Tensor, eps: float) -> None:
        self.buffers, self.lm_head, self.norm, self.eps = buffers, lm_head, norm, eps

    def run(self, x: Tensor, select: Tensor) -> Tensor:
        """Logits float32 of the rows of x that `select` names."""
        assert (x.dtype, select.dtype) == (torch.float32, torch.int32), "the residual is float32, rows are int32"
        r, rows = self.buffers, select.shape[0]
        args = BatchRowsArgs(
            x=pointer(x),
            norm=pointer(self.norm),
            h=pointer(r.h),
            select=pointer(select),
            tickets=pointer(r.tickets),
            rows=rows,
            norm_float=is_float_vector(self.norm),
            eps=self.eps,
        )
        r.run("batch_finish", args)
        out = torch.empty((rows, self.lm_head.n), dtype=torch.float32, device=x.device)
        self.lm_head.run(r.machine, r.h, out, rows, tickets=r.tickets.data_ptr())
        return out
