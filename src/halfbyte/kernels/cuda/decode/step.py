"""The decode step: its weights, its mailboxes and its launch, on a GPU or in the emulator.

`StepWeights` says where the weights lie, `DecodeStep` owns the buffers and launches. It never converts a weight:
matrices come in the layout "tile16", and anything else is a PlanError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats.tile16 import tile_shape
from halfbyte.kernels.cuda.decode.shape import (
    HEAD_DIM,
    KV_DTYPES,
    LAYER_FIELDS,
    MOST_CONTRIBUTIONS,
    MOST_TAPS,
    PAGE,
    ROUTER_COPIES,
    ROUTER_SETS,
    TOP_K,
    StepArgs,
    StepShape,
    build_of,
    octaves_of,
)
from halfbyte.kernels.cuda.device.host import KernelMachine, pointer


@dataclass
class StepLayer:
    """One layer as the kernel reads it: matrices uint8 in tile16, everything else bf16."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor
    o_bias: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor
    attn_norm: Tensor
    mlp_norm: Tensor
    router: Tensor  # [hidden / 16, experts, 16], see `tile_router`
    router_bias: Tensor
    sinks: Tensor


@dataclass
class StepWeights:
    layers: Sequence[StepLayer]
    embed: Tensor
    final_norm: Tensor
    lm_head: Tensor | None  # None: of a lent step


def tile_router(router: Tensor) -> Tensor:
    """Router [experts, hidden] with the 16 columns of one tile of rows next to each other."""
    experts, hidden = router.shape
    return router.view(experts, hidden // 16, 16).transpose(0, 1).contiguous()


class DecodeStep:
    """Buffers around one compiled step. Its inputs (`tokens`, `positions`, `row_seq`, tables) are device tensors of its
    own unless `read` names others.

    A lent step (`StepShape.lent`) runs all layers over another engine's pages, `pool` being those of each layer by
    themselves, and leaves the residual stream in `residual`; the last norm and the head are that engine's."""

    def __init__(
        self,
        shape: StepShape,
        weights: StepWeights,
        machine: KernelMachine,
        *,
        pool: Tensor | Sequence[Tensor],
        tables: tuple[Tensor, Tensor],
        rope: Tensor,
        norm_eps: float = 1e-5,
        swiglu_limit: float = 7.0,
        swiglu_alpha: float = 1.702,
        advance: bool = False,
    ) -> None:
        reason = shape.refuse()
        if reason:
            raise PlanError(f"the CUDA decode step {reason}.")
        if max(machine.blocks, shape.kv_heads) * ROUTER_SETS > MOST_CONTRIBUTIONS:
            most = MOST_CONTRIBUTIONS // ROUTER_SETS
            raise PlanError(f"the CUDA decode step runs on at most {most} multiprocessors, not {machine.blocks}.")
        self.shape, self.weights, self.machine = shape, weights, machine
        pools = [pool] if isinstance(pool, Tensor) else list(pool)
        self._check(weights, pools, tables, rope)
        machine.load(build_of(shape))
        device = pools[0].device
        r = shape.rows

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens, self.positions = zeros(r, dtype=torch.int32), zeros(r, dtype=torch.int32)
        self.row_seq = torch.arange(r, dtype=torch.int32, device=device)
        self.logits = zeros(0 if shape.lent else r, shape.vocab, dtype=torch.float32)
        self.residual = zeros(r if shape.lent else 0, shape.hidden, dtype=torch.float32)
        self.next_tokens = zeros(r, dtype=torch.int32)
        self.control = zeros(2, dtype=torch.int32)
        self.control[0] = 1
        self.trace = zeros(machine.blocks, shape.layers + 1, 32) if shape.trace else None
        self.taps = zeros(MOST_TAPS if shape.taps else 0, r, shape.hidden, dtype=torch.float32)
        self.boxes = {
            "x": zeros(2, r, shape.hidden),
            "mid": zeros(2, r, shape.hidden),
            "logits": zeros(2, r, ROUTER_COPIES, shape.experts),
            "qkv": zeros(r, shape.qkv_dim),
            "part": zeros(r, shape.heads, shape.splits, 34),
            "h": zeros(r, TOP_K, shape.intermediate // 2),
            "best": zeros(r),
            "broken": zeros(r),
        }
        octaves = octaves_of(weights.embed)
        table = (shape.layer_args * shape.layers)()
        for i, (args, layer) in enumerate(zip(table, weights.layers)):
            for name in LAYER_FIELDS:
                setattr(args, name, getattr(layer, name).data_ptr())
            if shape.lent:
                args.pages = pools[i].data_ptr()
        self._layers = torch.frombuffer(bytearray(bytes(table)), dtype=torch.uint8).to(device)
        self._keep = (pools, tables, rope)
        self.args = StepArgs(
            layers=self._layers.data_ptr(),
            embed=weights.embed.data_ptr(),
            final_norm=weights.final_norm.data_ptr(),
            head=pointer(weights.lm_head),
            tokens=self.tokens.data_ptr(),
            positions=self.positions.data_ptr(),
            row_seq=self.row_seq.data_ptr(),
            sliding_table=tables[0].data_ptr(),
            full_table=tables[1].data_ptr(),
            pool=None if shape.lent else pools[0].data_ptr(),
            rope=rope.data_ptr(),
            logits_out=(self.residual if shape.lent else self.logits).data_ptr(),
            next_tokens=self.next_tokens.data_ptr(),
            control=self.control.data_ptr(),
            failure=machine.failure.data_ptr(),
            trace=self.trace.data_ptr() if self.trace is not None else None,
            taps=self.taps.data_ptr(),
            norm_eps=norm_eps / 4.0**octaves,  # norms see the residual in its unit
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            unit=2.0**octaves,
            per_unit=2.0**-octaves,
            rows=r,
            max_blocks=tables[0].shape[1],
            page_layers=pools[0].shape[1],
            advance=int(advance),
        )
        for name, box in self.boxes.items():
            setattr(self.args, f"box_{name}", box.data_ptr())

    def read(self, tokens: Tensor, positions: Tensor, row_seq: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        """From now on the step reads these, where they lie; tables [sequences, blocks], both alike."""
        inputs = (tokens, positions, row_seq, *tables)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in inputs), [
            (t.dtype, t.stride()) for t in inputs
        ]
        assert tables[0].shape == tables[1].shape
        assert not self.args.advance
        a = self.args
        a.tokens, a.positions, a.row_seq, a.sliding_table, a.full_table = (t.data_ptr() for t in inputs)
        a.max_blocks = tables[0].shape[1]
        self._inputs = inputs  # kept alive

    def run(self, rows: int | None = None, taps: Sequence[int] = ()) -> Tensor:
        """One step on torch's current stream: logits, next_tokens, and the cache written. Returns the residual stream
        at the boundaries `taps` (b: what enters layer b, or leaves the last one), [taps, rows, hidden]."""
        rows = self.shape.rows if rows is None else rows
        boundaries = sorted(set(taps))
        if len(boundaries) > len(self.taps):
            raise PlanError(
                f"the CUDA decode step leaves hidden states at {len(self.taps)} places, not at {len(boundaries)}."
            )
        self.args.rows, self.args.tap_layers = rows, sum(1 << b for b in boundaries)
        self.machine.run(build_of(self.shape), self.machine.blocks, self.args)
        left = self.taps.view(-1)[: len(boundaries) * rows * self.shape.hidden].view(-1, rows, self.shape.hidden)
        return left if boundaries == list(taps) else left[[boundaries.index(b) for b in taps]]

    def _check(
        self, weights: StepWeights, pools: Sequence[Tensor], tables: tuple[Tensor, Tensor], rope: Tensor
    ) -> None:
        s = self.shape
        want: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
            ("embed", weights.embed, (s.vocab, s.hidden), torch.bfloat16),
            ("final_norm", weights.final_norm, (s.hidden,), torch.bfloat16),
            ("rope", rope, (rope.shape[0], 64), torch.float32),
        ]
        assert len(pools) == (s.layers if s.lent else 1), "the pages of every layer, or one pool"
        if not s.lent:
            assert weights.lm_head is not None, "only a lent step has no head"
            want.append(("lm_head", weights.lm_head, tile_shape(s.vocab, s.hidden, s.lm_head), torch.uint8))
        for i, pool in enumerate(pools):
            layers = 1 if s.lent else pool.shape[1]
            form = (pool.shape[0], layers, 2, s.kv_heads, PAGE, HEAD_DIM)
            want.append((f"pages of layer {i}" if s.lent else "pool", pool, form, KV_DTYPES[s.kv]))
        want += [(f"table {i}", t, (t.shape[0], tables[0].shape[1]), torch.int32) for i, t in enumerate(tables)]
        for i, layer in enumerate(weights.layers):
            sizes = _layer_shapes(s, i)
            want += [(f"layer {i} {n}", getattr(layer, n), *sizes[n]) for n in LAYER_FIELDS]
        for name, tensor, size, dtype in want:
            if tuple(tensor.shape) != size or tensor.dtype != dtype or not tensor.is_contiguous():
                raise PlanError(
                    f"the CUDA decode step needs {name} as contiguous {dtype} {size}, not {tensor.dtype} "
                    f"{tuple(tensor.shape)}."
                )


def _layer_shapes(s: StepShape, layer: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    b, u = torch.bfloat16, torch.uint8
    return {
        "qkv": (tile_shape(s.qkv_dim, s.hidden, s.format_of("qkv", layer)), u),
        "o": (tile_shape(s.hidden, s.q_dim, s.format_of("o", layer)), u),
        "gate_up": ((s.experts, *tile_shape(2 * s.intermediate, s.hidden, "mxfp4")), u),
        "down": ((s.experts, *tile_shape(s.hidden, s.intermediate, "mxfp4")), u),
        "qkv_bias": ((s.qkv_dim,), b),
        "o_bias": ((s.hidden,), b),
        "gate_up_bias": ((s.experts, 2 * s.intermediate), b),
        "down_bias": ((s.experts, s.hidden), b),
        "attn_norm": ((s.hidden,), b),
        "mlp_norm": ((s.hidden,), b),
        "router": ((s.hidden // 16, s.experts, 16), b),
        "router_bias": ((s.experts,), b),
        "sinks": ((s.heads,), b),
    }
