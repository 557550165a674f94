"""The decode step's loop over tiles, alone: cycles of a tile, as it is and with products of a warpgroup.

    python -m bench run tile-loop --out tile-loop.json

No memory is waited for: weights stay in shared memory, and a feeding warp hands its slots round (tile_loop.cu). Today's
body is the decode step's own code, and so is "A in the decode step", the loop of experts by digits; the others
multiply E2M1 as E5M2 by two E4M3 digits of x. Every body is compared with float64 before it is timed, and what its sums
are off by stands beside its cycles. A tile is 16 x 2880 weights; at 132 multiprocessors, 4.5 TB/s and 1.78 GHz the
memory needs 1,290 cycles for one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.checks.decode_case import random_matrix, shape_of
from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte import formats
from halfbyte.formats import MXTensor, e2m1, tile16
from halfbyte.kernels.cuda.decode.shape import ATOM_CHUNKS, QUAD, StepShape
from halfbyte.kernels.cuda.device.host import INT, POINTER, KernelMachine, fields, gpu, options
from halfbyte.kernels.launch import Build, Program
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.result import Cell, Result, figure

SOURCE = Path(__file__).with_name("tile_loop.cu")
WIDTH, CHUNKS, CHUNK = 2880, 45, 544
# Of today's body more than it has slots; of A and B the five after which they begin again.
COMPARED_PASSES = 7
BOUND = 2e-3  # of the decode step's values (docs/numerics.md)
BODIES = {
    "today": 0,
    "today, a shift as a product": 1,
    "A: masks, two digits": 2,
    "B: a table, two digits": 3,
    "A in the decode step": 4,
}
THIRDS, ATOMS, PART = 3, 8, 15  # of K for a warpgroup: eight times four groups, of 15 chunks
DIGIT_SLOTS, DIGIT_SLOT_BYTES, DIGIT_WARPS = 20, 8192, 12


class ProbeArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "weights", "digits", "x_scales", "x", "out", "cycles", "failure"),
        *fields(INT, "passes", "kept"),
    ]


@dataclass(frozen=True)
class LoopBody:
    """One way to multiply a tile, as it is compiled."""

    name: str
    step: StepShape  # whose ring and warps today's body has

    @property
    def number(self) -> int:
        return BODIES[self.name]

    @property
    def today(self) -> bool:
        return self.number < 2

    @property
    def in_step(self) -> bool:
        """The decode step's own code, with its ring and warps."""
        return self.today or self.number == 4

    @property
    def shape(self) -> StepShape:
        changed = replace(self.step, digits=not self.today)
        return replace(changed, defines=(f"HB_BY_PRODUCT={self.number}",)) if self.today else changed

    @property
    def rows(self) -> int:
        """Rows of the weights in one pass."""
        return 16 if self.today else 64

    @property
    def slots(self) -> int:
        return self.shape.slots if self.in_step else DIGIT_SLOTS

    @property
    def slot_bytes(self) -> int:
        return self.shape.slot_bytes if self.in_step else DIGIT_SLOT_BYTES

    def build(self) -> Build:
        own = options({"BODY": self.number})
        if self.in_step:
            step = self.shape
            own, threads, shared = own + step.program().options, step.threads, step.shared_bytes
        else:
            threads = 32 * (DIGIT_WARPS + 1)
            shared = (
                THIRDS * ATOMS * 1024 + DIGIT_SLOTS * (DIGIT_SLOT_BYTES + 16) + THIRDS * 128 + 2 * THIRDS * 256 + 1024
            )
        return Build(f"tile loop, {self.name}", Program(SOURCE, "tile_loop", own), threads, shared, early=False)


# ---- inputs and what is expected of them -----------------------------------------------------------------------------


def digits_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [2880] as the tensor core reads it, uint8 [3, 8, 1024], and the scales of its groups, float32 [3, 32].

    A group is (high + low / 16) * scale. Row 2 q + d of an atom has digit d of group q in bytes 32 q to 32 q + 31 and
    zeros elsewhere; sixteen-byte units of row r are permuted by XOR with r."""
    groups = x.float().view(THIRDS, 2 * PART, 32)
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(2.0**-100))) - 7)
    exact = groups / scale[..., None]
    high = exact.to(torch.float8_e4m3fn)
    low = ((exact - high.float()) * 16).to(torch.float8_e4m3fn)
    atoms = torch.zeros((THIRDS, ATOMS, 8, 4, 32), dtype=torch.uint8, device=x.device)
    for group in range(2 * PART):
        for digit, part in enumerate((high, low)):
            atoms[:, group // 4, 2 * (group % 4) + digit, group % 4] = part[:, group].view(torch.uint8)
    units = atoms.view(THIRDS, ATOMS, 8, 8, 16)
    unit = torch.arange(8, device=x.device)
    swizzled = torch.empty_like(units)
    for row in range(8):
        swizzled[:, :, row, unit ^ row] = units[:, :, row, unit]
    scales = torch.zeros((THIRDS, 4 * ATOMS), device=x.device)
    scales[:, : 2 * PART] = scale
    return swizzled.reshape(THIRDS, ATOMS, 1024).contiguous(), scales


def table_words(codes: Tensor) -> Tensor:
    """E2M1 codes [..., 8] of one row, k = 4 t .. 4 t + 3 and 16 + 4 t .., as the words of layout B."""
    code = codes.to(torch.int64)
    word = torch.zeros(code.shape[:-1], dtype=torch.int64, device=codes.device)
    for byte in range(4):
        first, second = code[..., byte], code[..., 4 + byte]
        # magnitudes of the first four in the lower half, of the others in the upper; signs where bytes have room
        word |= (first & 7) << 4 * byte | (second & 7) << 16 + 4 * byte
        word |= (first & 8) << 8 * byte + 4 | (second & 8) << 8 * byte
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def digit_slots(body: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Slots of random weights for A or B, uint8 [slots, bytes], and their values, float64 [slots, 16, 960]."""
    codes = torch.randint(0, 16, (DIGIT_SLOTS, 16, PART, 2, 32), device=device)
    scales = torch.randint(115, 125, (DIGIT_SLOTS, 16, PART, 2), device=device)
    values = (
        torch.tensor(e2m1.VALUES, dtype=torch.float64, device=device)[codes]
        * torch.exp2(scales.double() - 127)[..., None]
    )
    size = (DIGIT_SLOTS, 16, PART * 64)  # a slot has one tile: matrices of one each
    pairs = codes.view(DIGIT_SLOTS, 16, PART * 32, 2).to(torch.uint8)
    small = scales.view(DIGIT_SLOTS, 16, PART * 2).to(torch.uint8)
    chunks = tile16.pack_e5m2(MXTensor(pairs[..., 0] | pairs[..., 1] << 4, small, size, "mxfp4")).data[:, 0]
    if body == 3:
        # slot, r, g, chunk, group, half of 16, t, four -> slot, chunk, g, t, group, r, half, four
        lanes = codes.view(DIGIT_SLOTS, 2, 8, PART, 2, 2, 4, 4).permute(0, 3, 2, 6, 4, 1, 5, 7)
        packed = table_words(lanes.reshape(*lanes.shape[:6], 8)).reshape(DIGIT_SLOTS, PART, 128)
        chunks[..., :512] = packed.view(torch.uint8)
    chunks = chunks.reshape(DIGIT_SLOTS, PART * CHUNK)
    slots = torch.zeros((DIGIT_SLOTS, DIGIT_SLOT_BYTES), dtype=torch.uint8, device=device)
    slots[:, : PART * CHUNK] = chunks
    return slots, values.reshape(DIGIT_SLOTS, 16, PART * 64)


def today_slots(body: LoopBody, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Slots of random weights in tile16, and their values: the first slot of a tile has 24 chunks, the second 21, and a
    slot may be either."""
    chunks = random_matrix(body.slots * 16, 24 * 64, format="mxfp4", device=device)  # [slots, 24, 544]
    slots = torch.zeros((body.slots, body.slot_bytes), dtype=torch.uint8, device=device)
    slots[:, : 24 * CHUNK] = chunks.reshape(body.slots, -1)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    matrix = MXTensor(chunks, none, (body.slots * 16, 24 * 64), "mxfp4", "tile16")
    return slots, formats.dequantize(tile16.unpack(matrix), torch.float32).double().view(body.slots, 16, 24 * 64)


def atom_slots(body: LoopBody, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Slots of random chunks in tile16_e5m2, and the values of each chunk, float64 [slots, chunks, 16, 64]."""
    count = body.slot_bytes // CHUNK
    chunks = random_matrix(body.slots * count, 16, 64, format="mxfp4", device=device)  # a matrix each
    none = torch.empty(0, dtype=torch.uint8, device=device)
    matrix = MXTensor(chunks, none, (body.slots * count, 16, 64), "mxfp4", "tile16_e5m2")
    values = formats.dequantize(matrix, torch.float32).double().view(body.slots, count, 16, 64)
    slots = torch.zeros((body.slots, body.slot_bytes), dtype=torch.uint8, device=device)
    slots[:, : count * CHUNK] = chunks.reshape(body.slots, -1)
    return slots, values


def atom_values(body: LoopBody, values: Tensor, number: int) -> Tensor:
    """What pass `number` takes from the ring: four tiles, float64 [64, 2880]."""
    atoms = -(-CHUNKS // ATOM_CHUNKS)
    in_slot = body.slot_bytes // (QUAD * ATOM_CHUNKS * CHUNK)
    parts = []
    for atom in range(atoms):
        slot = (-(-atoms // in_slot) * number + atom // in_slot) % body.slots
        count = min(ATOM_CHUNKS, CHUNKS - atom * ATOM_CHUNKS)  # of each tile, the last atom has less
        first = atom % in_slot * QUAD * ATOM_CHUNKS
        chunks = values[slot, first : first + QUAD * count].view(QUAD, count, 16, 64)
        parts.append(chunks.transpose(1, 2).reshape(QUAD * 16, count * 64))
    return torch.cat(parts, -1)


def expected_sums(body: LoopBody, values: Tensor, x: Tensor, passes: int) -> Tensor:
    """The sums of the first passes, float64 [passes, rows]."""
    sums = []
    for number in range(passes):
        if body.today:
            first, second = values[2 * number % body.slots], values[(2 * number + 1) % body.slots]
            sums.append(first @ x[:1536] + second[:, : WIDTH - 1536] @ x[1536:])
            continue
        if body.in_step:
            sums.append(atom_values(body, values, number) @ x)
            continue
        parts = [
            values[(DIGIT_WARPS * number + warp) % DIGIT_SLOTS] @ x.view(THIRDS, -1)[warp // 4] for warp in range(12)
        ]
        sums.append(torch.cat([parts[i] + parts[4 + i] + parts[8 + i] for i in range(4)]))
    return torch.stack(sums)


def paired_words(x: Tensor) -> Tensor:
    """x as a mailbox holds it (mailbox.cuh; times 2^100, see widen.cuh): bf16 numbers lose nothing."""
    bits = (x.float() * 2.0**100).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    pair = (bits >> 10).view(-1, 2)
    return pair[:, 0] << 42 | pair[:, 1] << 20 | 1


class LoopCase:
    """One body with its inputs on a machine."""

    def __init__(self, body: LoopBody, machine: KernelMachine, device: str | torch.device = "cuda") -> None:
        self.body, self.machine, self.build = body, machine, body.build()
        machine.load(self.build)
        self.x = torch.randn(WIDTH, device=device).bfloat16()
        if body.in_step:
            slots, self.values = today_slots(body, device) if body.today else atom_slots(body, device)
        else:
            slots, self.values = digit_slots(body.number, device)
        digits, x_scales = digits_of(self.x)
        self.out = torch.full((COMPARED_PASSES, body.rows), float("nan"), device=device)
        self.cycles = torch.zeros(machine.blocks, dtype=torch.int64, device=device)
        tensors = (slots, digits, x_scales, paired_words(self.x), self.out, self.cycles, machine.failure)
        self.keep = tensors
        self.args = ProbeArgs(*(t.data_ptr() for t in tensors), passes=COMPARED_PASSES, kept=COMPARED_PASSES)

    def run(self, passes: int, blocks: int | None = None) -> None:
        self.args.passes = passes
        self.machine.run(self.build, blocks or self.machine.blocks, self.args)

    def check(self) -> tuple[Verdict, float]:
        """The verdict, and the error relative to the sums' size."""
        self.out.fill_(float("nan"))
        self.run(COMPARED_PASSES)
        sums, expected = self.out.double(), expected_sums(self.body, self.values, self.x.double(), COMPARED_PASSES)
        verdict = Verdict(f"{COMPARED_PASSES} passes of {self.body.name}")
        verdict.compare("sums", sums, expected, BOUND)
        return verdict, float((sums - expected).square().mean().sqrt() / expected.square().mean().sqrt())


# ---- the measurement ---------------------------------------------------------------------------------------------


def measure(cell: Cell, case: LoopCase, tiles: int, repeats: int) -> Result:
    verdict, error = case.check()
    check = verdict.as_check()
    if not check.ok:
        return Result(cell, checks=(check,), detail={"error": error})
    passes, samples = tiles * 16 // case.body.rows, []
    for i in range(repeats + timing.WARM_UP):
        case.run(passes)
        if i >= timing.WARM_UP:
            samples.append(float(case.cycles.double().mean()) / tiles)
    return Result(cell, (figure("cycles of a tile", "cycles", samples),), (check,), detail={"error": error})


@dataclass(frozen=True)
class Options:
    bodies: tuple[str, ...] = option((), "of those there are; empty: all")
    tiles: int = option(12_000, "in a sample")
    repeats: int = 5


@measurement("tile-loop", needs=("gpu",), seconds=40, routine=False)
def tile_loop(run: Run, options: Options) -> None:
    timing.begin()
    step = shape_of("120b", "mxfp4")
    bodies = [LoopBody(name, step) for name in options.bodies or BODIES]
    timing.compile_all(body.build().program for body in bodies)
    run.sources |= receipts.hashes([SOURCE, *bodies[0].build().program.files()])
    for body in bodies:
        cell = Cell("kernel", "120b", path="tile loop", shape={"body": body.name})
        run.measure(
            cell, partial(lambda c, b: measure(c, LoopCase(b, gpu()), options.tiles, options.repeats), cell, body)
        )
