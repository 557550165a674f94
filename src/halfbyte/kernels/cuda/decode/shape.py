"""What the decode step is compiled for: sizes, formats, its ring and its warps, and the arguments of a launch.

`StepShape` refuses shapes the kernel was not written for. The structures and sizes here mirror step.cu and shape.cuh,
and tests compare them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats import tile16
from halfbyte.kernels.cuda.device.host import FLOAT, FORMATS, INT, LONG, POINTER, fields, options
from halfbyte.kernels.cuda.phase import BULK_COPY, MMA_SYNC, WGMMA, WGMMA_FP8
from halfbyte.kernels.launch import Build, Program

FOLDER = Path(__file__).parent
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
PAGE, HEAD_DIM, TOP_K, ROUTER_COPIES = 64, 64, 4, 4
SPLITS = 16  # most parts of a sequence, where a kv head has enough blocks for them
ROUTER_SETS, MOST_CONTRIBUTIONS = 3, 2047  # to a router logit: one of each set of every block (mailbox.cuh)
ROW_SIZES = (1, 2, 4, 8)
MOST_TAPS = 8  # boundaries of layers whose residual a step leaves
# A residual is counted in fixed point, 31 bits before the point and 23 behind it. One whose largest embedding lies
# between these two leaves room for what layers add and routers multiply, and has bits to spare. One that begins larger
# is counted in a unit that makes it 2^USUAL_OCTAVES, one that begins smaller in a unit that makes it 1.
LARGEST_EMBEDDING, USUAL_OCTAVES, MOST_OCTAVES = 2.0**14, 8, 60
SMALLEST_EMBEDDING = 2.0**-2
LARGE_BLOCK = 200_000  # bytes of shared memory from which the ring of a data centre's GPU fits


@dataclass(frozen=True)
class Tuning:
    """What was fastest (docs/LOG.md)."""

    workers: int  # warps that multiply
    slot_bytes: int  # of a slot of the ring
    ahead: int = 0  # slots of experts' weights that may be asked for and not yet used; 0: the whole ring
    rest: int = 0  # the same of all else
    probe: int = 1  # 1: who waits for a vector looks at a few words of it; 0: at all of them


# On an H200, of one row, by the format of the dense layers. With 24 KB and 12 warps a tile of an expert fills two slots
# by half, and a page fits in one; in larger slots it fills one, and five on their way are enough. With several rows a
# slot is a third of such a tile: 16 chunks of MXFP4, 8 of q8.
ONE_ROW = {
    "mxfp4": Tuning(12, 24_576, probe=0),
    "q8": Tuning(12, 26_112, ahead=5),
    "bf16": Tuning(12, 30_720, ahead=5),
}
SEVERAL_ROWS = Tuning(15, 8_704)
# Experts by digits (quads side by side are not timed yet): a slot for two atoms of four tiles, 24 chunks each, or for
# one where two leave too few slots. Slots of one atom were slower by 220 us a step, with four copies to each.
BY_DIGITS = {"mxfp4": Tuning(12, 26_112), "q8": Tuning(12, 26_112), "bf16": Tuning(12, 30_720)}
BY_DIGITS_OF_EIGHT = Tuning(12, 13_056)
THIRDS, QUAD, ATOM_CHUNKS = 3, tile16.QUAD, tile16.ATOM  # warpgroups, tiles, chunks of a tile (shape.cuh, struct Quad)
# sm_12x: ten warps with the feeding one, because with thirteen or more 128 registers are left to a thread and some are
# spilled; four rows need eight for the sake of six slots, eight rows do not fit.
SMALL_BLOCK, SMALL_BLOCK_OF_ROWS = Tuning(9, 8_704), Tuning(8, 8_704)
# Without a copy engine, by the compiler's account of registers alone: one row spills some outside of its products, and
# several rows need the 255 that a thread has where a scheduler has two warps.
UNITS, UNITS_OF_ROWS = Tuning(9, 8_704), Tuning(7, 8_704)


LAYER_FIELDS = (
    "qkv",
    "o",
    "gate_up",
    "down",
    "qkv_bias",
    "o_bias",
    "gate_up_bias",
    "down_bias",
    "attn_norm",
    "mlp_norm",
    "router",
    "router_bias",
    "sinks",
)


class LayerArgs(ctypes.Structure):
    _fields_ = fields(POINTER, *LAYER_FIELDS)


class LentLayerArgs(ctypes.Structure):
    """The tuning for another engine's pages, which are separate for each layer."""

    _fields_ = fields(POINTER, *LAYER_FIELDS, "pages")


BOXES = ("x", "mid", "logits", "qkv", "part", "h", "best", "broken")


class StepArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "layers", "embed", "final_norm", "head", "tokens", "positions", "row_seq"),
        *fields(POINTER, "sliding_table", "full_table", "pool", "rope", "logits_out", "next_tokens"),
        *fields(POINTER, *(f"box_{name}" for name in BOXES)),
        *fields(POINTER, "control", "failure", "trace", "taps"),
        *fields(LONG, "tap_layers"),
        *fields(FLOAT, "norm_eps", "swiglu_limit", "swiglu_alpha", "unit", "per_unit"),
        *fields(INT, "rows", "max_blocks", "page_layers", "advance"),
    ]


@dataclass(frozen=True)
class OtherFormat:
    """The layers whose matrix has another format than the rest."""

    format: str
    layers: frozenset[int]


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
    other_qkv: OtherFormat | None = None
    other_o: OtherFormat | None = None
    kv: str = "bf16"  # or fp8
    shared: int = 232_448  # bytes a block may have
    units: bool = False  # for a GPU without a copy engine: all lanes of the feeding warp copy (feeding.cuh)
    ring: int = 64  # slots at most; fewer in tests
    workers: int = 0  # warps that multiply; 0, here and below: as was fastest
    slot: int = 0  # bytes of a slot of the ring
    ahead: int = 0  # slots of experts' weights that may be asked for and not yet used
    rest: int = 0  # the same of all else
    nap: int = 20  # nanoseconds between two looks into a mailbox
    probe: int = -1  # 1: who waits for a vector looks at a few words of it; 0: at all of them; -1: as was fastest
    splits: int = SPLITS  # most parts a sequence's keys are cut into
    acquire: bool = False  # one thread of a block acquires in every phase (mailbox.cuh)
    keep_shared: bool = False  # what several blocks copy stays in L2
    digits: bool = False  # experts by products of a warpgroup, x in two E4M3 digits, weights in tile16_e5m2 (SM90)
    taps: bool = False  # leaves the residual at the boundaries of layers that a launch names
    lent: bool = False  # all layers over another engine's pages, and no head: see `step.DecodeStep`
    trace: bool = False
    defines: tuple[str, ...] = ()  # experiments

    @property
    def q_dim(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def qkv_dim(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    def format_of(self, role: str, layer: int) -> str:
        """The format of qkv or o in a layer."""
        usual, other = (self.qkv, self.other_qkv) if role == "qkv" else (self.o, self.other_o)
        return other.format if other is not None and layer in other.layers else usual

    def refuse(self) -> str | None:
        dense = {self.lm_head, *(self.format_of(role, i) for role in ("qkv", "o") for i in range(self.layers))}
        mixed = self.other_qkv is not None or self.other_o is not None
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
            (dense <= FORMATS.keys(), "reads mxfp4, q8 and bf16 matrices only"),
            (not mixed or self.layers <= 64, f"dispatches on the formats of 64 layers, not of {self.layers}"),
            (self.layers < 64, f"names the boundaries of fewer than 64 layers, not of {self.layers}"),
            (self.kv in KV_DTYPES, f"keeps keys and values in {' or '.join(KV_DTYPES)}, not in {self.kv}"),
            (
                not self.digits or (self.shared >= LARGE_BLOCK and not self.units and self.warps == THIRDS * QUAD),
                f"multiplies digits of x with {THIRDS * QUAD} warps of SM90 only",
            ),
            (self.slots >= 6, f"needs a ring of 6 slots beside its tables, {self.shared} bytes leave {self.slots}"),
        )
        return next((reason for ok, reason in checks if not ok), None)

    @property
    def layer_args(self) -> type[ctypes.Structure]:
        return LentLayerArgs if self.lent else LayerArgs

    @property
    def expert_layout(self) -> str:
        return "tile16_e5m2" if self.digits else "tile16"

    @property
    def _tuning(self) -> Tuning:
        if self.units:
            return UNITS if self.rows == 1 else UNITS_OF_ROWS
        if self.shared < LARGE_BLOCK:
            return SMALL_BLOCK if self.rows < 4 else SMALL_BLOCK_OF_ROWS
        one = self.rows == 1 and self.qkv == self.o == self.lm_head
        if self.digits:
            return BY_DIGITS_OF_EIGHT if self.rows == 8 else BY_DIGITS[self.qkv if one else "mxfp4"]
        return ONE_ROW[self.qkv] if one and self.qkv in ONE_ROW else SEVERAL_ROWS

    @property
    def warps(self) -> int:
        return self.workers or self._tuning.workers

    @property
    def slot_bytes(self) -> int:
        return self.slot or self._tuning.slot_bytes

    @property
    def slots(self) -> int:
        """Ring slots: as many as fit into shared memory with everything else."""
        return min(self.ring, (self.shared - self._fixed) // (self.slot_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        return self._fixed + self.slots * (self.slot_bytes + 16)

    @property
    def _fixed(self) -> int:
        """Shared memory without the ring, at most (mirrors struct Shared; tests compare)."""
        red = 2 * (3 if self.rows == 1 else min(16, 2 * self.warps)) * self.warps * 16 * 4
        merge = self.warps // 4 * 4 * 8 * (64 + 4 + 1 + 1) * 4
        routing = 2 * (4 + 4 * 4 * self.rows * 3 + 4 * self.rows)
        tables = 2 * 8 * 72 * 2 + 2 * 16 * 64 * 2 + self.rows * (2 * 608 * 2 + self.warps * 2 * 16 * 2 + 16 * 4)
        rest = ctypes.sizeof(StepArgs) + ctypes.sizeof(self.layer_args) * self.layers + 24 * self.rows + 512
        aligned = 2048 if self.digits else 0
        return max(red, merge, self._digit_bytes) + aligned + tables + routing + rest

    @property
    def _digit_bytes(self) -> int:
        """struct DigitBuffers."""
        if not self.digits:
            return 0
        atoms, sets = -(-max(self.hidden, self.intermediate) // 64 // ATOM_CHUNKS), max(1, self.rows // 4)
        sums = 2 * (12 if self.rows <= 2 else 4) * THIRDS * self.rows * 16 * 4
        return atoms * THIRDS * (sets * 1024 + 4 * self.rows * 4) + sums

    def options(self) -> tuple[str, ...]:
        tuning = self._tuning
        ahead, rest = self.ahead or tuning.ahead, self.rest or tuning.rest  # 0: the whole ring
        values = {
            "HIDDEN": self.hidden,
            "INTER": self.intermediate,
            "LAYERS": self.layers,
            "EXPERTS": self.experts,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "VOCAB": self.vocab,
            "WINDOW": self.window,
            "ROWS": self.rows,
            "SLOTS": self.slots,
            "SLOT_BYTES": self.slot_bytes,
            "WORKERS": self.warps,
            "AHEAD": min(ahead or self.slots, self.slots),
            "AHEAD_REST": min(rest or self.slots, self.slots),
            "NAP": self.nap,
            "PROBE": tuning.probe if self.probe < 0 else self.probe,
            "SPLITS": self.splits,
            "ACQUIRE": int(self.acquire),
            "KEEP_SHARED": int(self.keep_shared),
            "KV_FP8": int(self.kv == "fp8"),
            "FORMAT_QKV": FORMATS[self.qkv],
            "FORMAT_O": FORMATS[self.o],
            "FORMAT_HEAD": FORMATS[self.lm_head],
        }
        if self.digits:
            values["TILE_BODY"] = 1
        for name, other in (("QKV", self.other_qkv), ("O", self.other_o)):
            if other is not None:
                layers = sum(1 << layer for layer in other.layers)
                values |= {f"FORMAT_OTHER_{name}": FORMATS[other.format], f"OTHER_{name}": layers}
        extra = tuple(
            f"-D{d}"
            for d in (
                *(("HB_TRACE",) * self.trace),
                *(("HB_LENT",) * self.lent),
                *(("HB_TAPS",) * self.taps),
                *self.defines,
            )
        )
        return options(values) + extra

    def program(self) -> Program:
        return Program(FOLDER / "step.cu", "decode_step", self.options())

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)


def octaves_of(embed: Tensor) -> int:
    """The octaves of the unit in which the residual is counted, by the largest token embedding."""
    largest = max(abs(float(end)) for end in embed.aminmax())
    if not 0 < largest < math.inf or SMALLEST_EMBEDDING <= largest <= LARGEST_EMBEDDING:
        return 0
    octaves = math.ceil(math.log2(largest))
    return max(octaves, -MOST_OCTAVES) if octaves < 0 else min(octaves - USUAL_OCTAVES, MOST_OCTAVES)


@functools.cache
def build_of(shape: StepShape) -> Build:
    """One block to a multiprocessor, all resident: they wait for each other."""
    large = shape.shared >= LARGE_BLOCK
    return Build(
        f"decode_{'layers' if shape.lent else 'step'} rows={shape.rows}{' taps' if shape.taps else ''}",
        shape.program(),
        shape.threads,
        shape.shared_bytes,
        early=False,
        cooperative=True,
        need=(MMA_SYNC, BULK_COPY, *((WGMMA_FP8,) if shape.digits else ())),
        ban="" if shape.digits else WGMMA,
        known_spills="decode_step|phase_attention" if large else "",  # not in the loops of qkv, experts and lm_head
        spill_limit=192,
        spills_on_sm80=136,  # the same functions; four rows beside bf16 spill a word in phase_up as well
    )
