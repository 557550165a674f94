"""The decode step: its shapes, its arguments, its mailboxes, and the two machines it runs on (a GPU, or the emulator).

`StepShape` says what is compiled, `StepWeights` where the weights lie, `DecodeStep` owns the buffers and launches.
It refuses shapes the kernel was not written for; it never converts a weight: matrices come in the layout "tile16".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats.tile16 import tile_shape
from halfbyte.kernels.launch import Kernel, Program, compile_program

FOLDER = Path(__file__).parent
FORMATS = {"mxfp4": 0, "q8": 1, "bf16": 2}
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PAGE, HEAD_DIM, TOP_K, SPLITS, ROUTER_COPIES = 64, 64, 4, 16, 4
ROW_SIZES = (1, 2, 4, 8)
# What was fastest on an H200 (docs/LOG.md): warps that multiply, bytes of a slot, `ahead`, `rest` and `probe`; of one
# row and a large ring by the format of the dense layers, else the usual. With 24 KB and 12 warps a tile of an expert
# fills two slots by half, and a page fits in one; in larger slots it fills one, and five on their way are enough. A
# usual slot is a third of such a tile: 16 chunks of MXFP4, 8 of q8.
TUNED = {"mxfp4": (12, 24_576, 0, 0, 0), "q8": (12, 26_112, 5, 0, 1), "bf16": (12, 30_720, 5, 0, 1)}
USUAL = (15, 8_704, 0, 0, 1)
# sm_12x: ten warps with the feeding one, because with thirteen or more 128 registers are left to a thread and some are
# spilled; four rows need eight for the sake of six slots, eight rows do not fit.
SMALL, CRAMPED = (9, 8_704, 0, 0, 1), (8, 8_704, 0, 0, 1)


@dataclass(frozen=True)
class StepShape:
    """Everything the kernel is compiled for."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    heads: int
    kv_heads: int
    vocab: int
    window: int = 128
    rows: int = 1
    qkv: str = "mxfp4"
    o: str = "mxfp4"
    lm_head: str = "mxfp4"
    kv: str = "bf16"  # or fp8
    shared: int = 232_448  # bytes a block may have
    ring: int = 64  # slots at most; fewer in tests
    workers: int = 0  # warps that multiply; 0, here and below: as was fastest
    slot: int = 0  # bytes of a slot of the ring
    ahead: int = 0  # slots of experts' weights that may be asked for and not yet used
    rest: int = 0  # the same of all else
    nap: int = 20  # nanoseconds between two looks into a mailbox
    probe: int = -1  # 1: who waits for a vector looks at a few words of it; 0: at all of them; -1: as was fastest
    trace: bool = False
    defines: tuple[str, ...] = ()  # experiments

    @property
    def q_dim(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def qkv_dim(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    def refuse(self) -> str | None:
        checks = (
            (self.heads == 8 * self.kv_heads, f"needs 8 query heads per kv head, not {self.heads}/{self.kv_heads}"),
            (self.hidden % 64 == 0 and self.intermediate % 64 == 0, "needs hidden and intermediate in multiples of 64"),
            (self.vocab % 16 == 0, f"needs a vocabulary in multiples of 16, not {self.vocab}"),
            (self.experts % 32 == 0 and self.experts <= 256, f"needs experts in multiples of 32, not {self.experts}"),
            (
                self.experts <= self.hidden // ROUTER_COPIES,
                f"needs hidden of {ROUTER_COPIES} times the experts or more",
            ),
            (self.rows in ROW_SIZES, f"is built for 1, 2, 4 or 8 rows, not {self.rows}"),
            (all(f in FORMATS for f in (self.qkv, self.o, self.lm_head)), "reads mxfp4, q8 and bf16 matrices only"),
            (self.kv in KV_DTYPES, f"keeps keys and values in {' or '.join(KV_DTYPES)}, not in {self.kv}"),
            (self.slots >= 6, f"needs a ring of 6 slots beside its tables, {self.shared} bytes leave {self.slots}"),
        )
        return next((reason for ok, reason in checks if not ok), None)

    @property
    def _tuned(self) -> tuple[int, int, int, int, int]:
        large = self.shared >= 200_000
        if not large:
            return SMALL if self.rows < 4 else CRAMPED
        one = self.rows == 1 and self.qkv == self.o == self.lm_head
        return TUNED[self.qkv] if one and self.qkv in TUNED else USUAL

    @property
    def warps(self) -> int:
        return self.workers or self._tuned[0]

    @property
    def slot_bytes(self) -> int:
        return self.slot or self._tuned[1]

    @property
    def slots(self) -> int:
        """As many as shared memory holds beside everything else."""
        return min(self.ring, (self.shared - self._fixed) // (self.slot_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        return self._fixed + self.slots * (self.slot_bytes + 16)

    @property
    def _fixed(self) -> int:
        """Shared memory without the ring, at most (mirrors struct Shared; tests compare)."""
        red = 2 * (3 if self.rows == 1 else 16) * self.warps * 16 * 4
        merge = self.warps // 4 * 4 * 8 * (64 + 4 + 1 + 1) * 4
        routing = 2 * (4 + 4 * 4 * self.rows * 3 + 4 * self.rows)
        tables = 2 * 8 * 72 * 2 + 2 * 16 * 64 * 2 + self.rows * (2 * 608 * 2 + self.warps * 2 * 16 * 2 + 16 * 4)
        rest = ctypes.sizeof(StepArgs) + ctypes.sizeof(LayerArgs) * self.layers + 24 * self.rows + 512
        return max(red, merge) + tables + routing + rest

    def options(self) -> tuple[str, ...]:
        ahead, rest = self.ahead or self._tuned[2], self.rest or self._tuned[3]  # 0: the whole ring
        values = {
            "HIDDEN": self.hidden, "INTER": self.intermediate, "LAYERS": self.layers, "EXPERTS": self.experts,
            "HEADS": self.heads, "KV_HEADS": self.kv_heads, "VOCAB": self.vocab, "WINDOW": self.window,
            "ROWS": self.rows, "SLOTS": self.slots, "SLOT_BYTES": self.slot_bytes, "WORKERS": self.warps,
            "AHEAD": min(ahead or self.slots, self.slots), "AHEAD_REST": min(rest or self.slots, self.slots),
            "NAP": self.nap, "PROBE": self._tuned[4] if self.probe < 0 else self.probe, "KV_FP8": int(self.kv == "fp8"),
            "FORMAT_QKV": FORMATS[self.qkv], "FORMAT_O": FORMATS[self.o], "FORMAT_HEAD": FORMATS[self.lm_head],
        }  # fmt: skip
        extra = (("-DHB_TRACE",) if self.trace else ()) + tuple(f"-D{d}" for d in self.defines)
        return tuple(f"-DHB_{name}={value}" for name, value in values.items()) + extra

    def program(self) -> Program:
        return Program(FOLDER / "step.cu", "decode_step", self.options())


_P = ctypes.c_void_p


LAYER_FIELDS = (
    "qkv", "o", "gate_up", "down", "qkv_bias", "o_bias", "gate_up_bias", "down_bias", "attn_norm", "mlp_norm",
    "router", "router_bias", "sinks",
)  # fmt: skip


class LayerArgs(ctypes.Structure):
    _fields_ = [(name, _P) for name in LAYER_FIELDS]


BOXES = ("x", "mid", "logits", "qkv", "part", "h", "best")


class StepArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("layers", "embed", "final_norm", "head", "tokens", "positions", "row_seq")),
        *((name, _P) for name in ("sliding_table", "full_table", "pool", "rope", "logits_out", "next_tokens")),
        *((f"box_{name}", _P) for name in BOXES),
        ("control", _P),
        ("failure", _P),
        ("trace", _P),
        ("norm_eps", ctypes.c_float),
        ("swiglu_limit", ctypes.c_float),
        ("swiglu_alpha", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("max_blocks", ctypes.c_int),
        ("page_layers", ctypes.c_int),
        ("advance", ctypes.c_int),
    ]


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
    lm_head: Tensor


def tile_router(router: Tensor) -> Tensor:
    """Router [experts, hidden] with the 16 columns of one tile of rows next to each other."""
    experts, hidden = router.shape
    return router.view(experts, hidden // 16, 16).transpose(0, 1).contiguous()


class Machine(Protocol):
    blocks: int

    def run(self, args: StepArgs) -> None: ...


class Gpu:
    """The kernel on the current CUDA device: one block per multiprocessor, all resident."""

    def __init__(self, shape: StepShape) -> None:
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}a"
        self.blocks = torch.cuda.get_device_properties().multi_processor_count
        self._threads = 32 * (shape.warps + 1)
        self._kernel = Kernel(compile_program(shape.program(), arch), "decode_step", shape.shared_bytes)

    def run(self, args: StepArgs) -> None:
        self._kernel.launch(self.blocks, self._threads, args, cooperative=True)


class DecodeStep:
    """Buffers around one compiled step. Its inputs (`tokens`, `positions`, `row_seq`, tables) are device tensors of its
    own unless `read` names others."""

    def __init__(
        self,
        shape: StepShape,
        weights: StepWeights,
        machine: Machine,
        *,
        pool: Tensor,
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
        self.shape, self.weights, self.machine = shape, weights, machine
        self._check(weights, pool, tables, rope)
        device = pool.device
        r = shape.rows

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens, self.positions = zeros(r, dtype=torch.int32), zeros(r, dtype=torch.int32)
        self.row_seq = torch.arange(r, dtype=torch.int32, device=device)
        self.logits = zeros(r, shape.vocab, dtype=torch.float32)
        self.next_tokens = zeros(r, dtype=torch.int32)
        self.control = zeros(2, dtype=torch.int32)
        self.failure = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.control[0] = 1
        self.trace = zeros(machine.blocks, shape.layers + 1, 32) if shape.trace else None
        self.boxes = {
            "x": zeros(2, r, shape.hidden),
            "mid": zeros(2, r, shape.hidden),
            "logits": zeros(2, r, ROUTER_COPIES, shape.experts),
            "qkv": zeros(r, shape.qkv_dim),
            "part": zeros(r, shape.heads, SPLITS, 34),
            "h": zeros(r, TOP_K, shape.intermediate // 2),
            "best": zeros(r),
        }
        table = (LayerArgs * shape.layers)()
        for args, layer in zip(table, weights.layers):
            for name in LAYER_FIELDS:
                setattr(args, name, getattr(layer, name).data_ptr())
        self._layers = torch.frombuffer(bytearray(bytes(table)), dtype=torch.uint8).to(device)
        self._keep = (pool, tables, rope)
        self.args = StepArgs(
            layers=self._layers.data_ptr(), embed=weights.embed.data_ptr(), final_norm=weights.final_norm.data_ptr(),
            head=weights.lm_head.data_ptr(), tokens=self.tokens.data_ptr(), positions=self.positions.data_ptr(),
            row_seq=self.row_seq.data_ptr(), sliding_table=tables[0].data_ptr(), full_table=tables[1].data_ptr(),
            pool=pool.data_ptr(), rope=rope.data_ptr(), logits_out=self.logits.data_ptr(),
            next_tokens=self.next_tokens.data_ptr(), control=self.control.data_ptr(),
            failure=self.failure.data_ptr(), trace=self.trace.data_ptr() if self.trace is not None else None,
            norm_eps=norm_eps, swiglu_limit=swiglu_limit, swiglu_alpha=swiglu_alpha, rows=r,
            max_blocks=tables[0].shape[1], page_layers=pool.shape[1], advance=int(advance),
        )  # fmt: skip
        for name, box in self.boxes.items():
            setattr(self.args, f"box_{name}", box.data_ptr())

    def read(self, tokens: Tensor, positions: Tensor, row_seq: Tensor, tables: tuple[Tensor, Tensor]) -> None:
        """From now on the step reads these, where they lie; tables [sequences, blocks], both alike."""
        given = (tokens, positions, row_seq, *tables)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in given), [(t.dtype, t.stride()) for t in given]
        assert tables[0].shape == tables[1].shape
        assert not self.args.advance
        a = self.args
        a.tokens, a.positions, a.row_seq, a.sliding_table, a.full_table = (t.data_ptr() for t in given)
        a.max_blocks = tables[0].shape[1]
        self._given = given

    def run(self, rows: int | None = None) -> None:
        """One step on torch's current stream: logits, next_tokens, and the cache written."""
        self.args.rows = self.shape.rows if rows is None else rows
        self.machine.run(self.args)

    def given_up(self) -> str | None:
        """Where a wait inside the kernel was given up (the launch then fails), for whoever debugs it."""
        where, place = (int(v) & 0xFFFFFFFF for v in self.failure)
        return f"wait {where:#x} in block {place >> 16}, thread {place & 0xFFFF}" if where else None

    def _check(self, weights: StepWeights, pool: Tensor, tables: tuple[Tensor, Tensor], rope: Tensor) -> None:
        s = self.shape
        want: list[tuple[str, Tensor, tuple[int, ...], torch.dtype]] = [
            ("embed", weights.embed, (s.vocab, s.hidden), torch.bfloat16),
            ("final_norm", weights.final_norm, (s.hidden,), torch.bfloat16),
            ("lm_head", weights.lm_head, tile_shape(s.vocab, s.hidden, s.lm_head), torch.uint8),
            ("rope", rope, (rope.shape[0], 64), torch.float32),
            ("pool", pool, (*pool.shape[:2], 2, s.kv_heads, PAGE, HEAD_DIM), KV_DTYPES[s.kv]),
        ]
        want += [(f"table {i}", t, (t.shape[0], tables[0].shape[1]), torch.int32) for i, t in enumerate(tables)]
        for i, layer in enumerate(weights.layers):
            sizes = _layer_shapes(s)
            want += [(f"layer {i} {n}", getattr(layer, n), *sizes[n]) for n in LAYER_FIELDS]
        for name, tensor, size, dtype in want:
            if tuple(tensor.shape) != size or tensor.dtype != dtype or not tensor.is_contiguous():
                raise PlanError(
                    f"the CUDA decode step needs {name} as contiguous {dtype} {size}, not {tensor.dtype} "
                    f"{tuple(tensor.shape)}."
                )


def _layer_shapes(s: StepShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    b, u = torch.bfloat16, torch.uint8
    return {
        "qkv": (tile_shape(s.qkv_dim, s.hidden, s.qkv), u),
        "o": (tile_shape(s.hidden, s.q_dim, s.o), u),
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
