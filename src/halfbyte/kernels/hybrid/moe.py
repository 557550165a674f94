"""The experts of a model of which the first layers' are in host memory.

In layers from `spec.host_layers` on the GPU holds the experts, and Triton's phase runs. In the layers before, a step of
few rows is multiplied by the CPU kernels: rows, chosen experts and their weights are copied to page-locked memory, the
stream calls the library, and the sum comes back. Nothing waits for the interpreter, so the step can be captured in a
CUDA graph. A step of many rows would keep the CPU longer than the wire: then the layer's experts are copied to the GPU
in pieces, unpacked there while the next piece is on its way, and multiplied by Triton's phase. From how many rows on is
measured when the model is bound; with --deterministic, prompts are streamed and answers are not.

Experts lie in host memory once, in the CPU kernels' layout. Built without a GPU at hand: it has run with Triton's
interpreter and a link that copies at once, not on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfbyte.errors import NotEnoughMemoryError, PlanError
from halfbyte.formats import MXTensor, convert
from halfbyte.formats.stored import Packer
from halfbyte.formats.tensor import GEOMETRY
from halfbyte.gates import Gates
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.cpu.build import Unavailable
from halfbyte.kernels.cpu.cores import threads_beside_gpu
from halfbyte.kernels.cpu.operations import Caller, experts_struct, kernel_name
from halfbyte.kernels.cpu.packing import packer_of
from halfbyte.kernels.cpu.phase import declared
from halfbyte.kernels.cuda.device.host import GRAPH_ROWS
from halfbyte.kernels.hybrid import link as links
from halfbyte.kernels.launch import host_functions
from halfbyte.kernels.triton.moe import TritonMoe
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import launched
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared, NodeKernel
from halfbyte.plan.step import Step

ENTRY = "hb_run_expert_job"
STATE = "experts in host memory"  # of Binding.state
SCRATCH_ROWS = 256  # the library takes more in turns
PIECES = 8  # of a layer's matrix on its way to the GPU
TRIED_ROWS = (GRAPH_ROWS + 1, 128, 256, 512, 1024, 2048)  # where the wire may be faster than the CPU
NEVER = 1 << 30


class HybridMoe(TritonMoe):
    name, rank = "hybrid.moe", 20
    tiles = ("auto", "128x128", "64x128")
    host_experts = True

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        formats = {form for role in ("gate_up", "down") for form in spec.matrices.kinds(role)}
        if formats != {"mxfp4"}:
            return f"holds MXFP4 experts in host memory, not {' and '.join(sorted(formats))}"
        try:
            native.open_library(gates.cpu_instructions)
        except Unavailable as e:
            return f"needs the CPU kernels: {e}"
        return super().refuse(spec, arch, gates)

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return [*super().declares(spec, arch), *declared(functools.partial(kernel_name, entry=ENTRY))]

    def packer(self, gates: Gates) -> Packer | None:
        try:
            return packer_of(native.open_library(gates.cpu_instructions), threads_beside_gpu(gates).count)
        except Unavailable as e:
            raise PlanError(f"the CPU kernels cannot run here: {e}.") from None

    def thread_counts(self) -> list[int]:
        return native.pool_sizes()

    def bind(self, b: Binding) -> Launch:
        assert b.layer is not None
        if b.layer >= b.spec.host_layers:
            return super().bind(b)
        if STATE not in b.state:
            b.state[STATE] = HostState(b)
        return HostLayer(b, b.state[STATE], super().bind).launch


@dataclass(frozen=True)
class RowBuffers:
    """Buffers for rows on their way: the same words on the GPU and in host memory."""

    device_in: Tensor
    host_in: Tensor
    device_out: Tensor
    host_out: Tensor


class HostState:
    """What the layers of one model share."""

    def __init__(self, b: Binding) -> None:
        self.spec, self.device = b.spec, b.weights.router.device
        self.link = links.link_of(self.device)
        self.caller = Caller(b, ENTRY, threads_beside_gpu(b.gates))
        address = ctypes.cast(self.caller.call, ctypes.c_void_p).value
        assert address is not None
        self.function = address
        host_functions[address] = NodeKernel(self.caller.image.name, self.caller.image.module)
        self.deterministic = b.gates.deterministic == "on"
        self.stream_from: int | None = None  # rows; measured with the first layer
        self._rooms: dict[int, RowBuffers] = {}  # never given back: a captured graph may hold their addresses
        self._scratch: int | None = None
        self._stream: ExpertStream | None = None

    def room(self, rows: int) -> RowBuffers:
        size = GRAPH_ROWS if rows <= GRAPH_ROWS else 1 << (rows - 1).bit_length()
        if size not in self._rooms:
            inward, outward = size * (self.spec.hidden + 2 * self.spec.top_k), size * self.spec.hidden
            self._rooms[size] = RowBuffers(
                torch.empty(inward, device=self.device), self.link.page_locked(inward),
                torch.empty(outward, device=self.device), self.link.page_locked(outward),
            )  # fmt: skip
        return self._rooms[size]

    def scratch(self, experts: native.ExpertsStruct) -> int:
        if self._scratch is None:
            caller = self.caller
            handle = caller.library.calls.hb_scratch_create(
                experts, caller.pool, SCRATCH_ROWS, caller.error, native.ERROR_BYTES
            )
            if not handle:
                text = caller.error.value.decode(errors="replace")
                raise NotEnoughMemoryError(f"the CPU kernels have no memory: {text}")
            self._scratch = handle
        return self._scratch

    def stream(self, gate_up: MXTensor, down: MXTensor) -> ExpertStream:
        if self._stream is None:
            self._stream = ExpertStream(self.link, self.device, gate_up, down)
        return self._stream


class HostLayer:
    """One layer whose experts are in host memory."""

    def __init__(self, b: Binding, state: HostState, bind_triton: Callable[[Binding], Launch]) -> None:
        w, self._state, self._layer = b.weights, state, b.layer
        for role in ("gate_up", "down"):
            matrix = getattr(w, role)
            if not isinstance(matrix, MXTensor) or matrix.layout != "rows16" or matrix.device.type != "cpu":
                raise PlanError(f"{role} of layer {b.layer} is not in host memory, where the plan has it.")
            state.link.lock(matrix.data)
        self._gate_up, self._down = w.gate_up, w.down
        self._biases = w.gate_up_bias.float().cpu().contiguous(), w.down_bias.float().cpu().contiguous()
        self._experts = experts_struct(
            state.caller, w.gate_up, w.down, self._biases, int8=b.spec.host_activation == "int8"
        )
        self._jobs: dict[int, native.ExpertJobStruct] = {}  # by rows; a captured graph may hold their addresses
        stream = state.stream(w.gate_up, w.down)
        self._triton = bind_triton(replace(b, weights=replace(w, gate_up=stream.gate_up, down=stream.down)))
        if state.stream_from is None:
            state.stream_from = self._crossover()

    def launch(self, step: Step, acts: Activations) -> None:
        state = self._state
        assert state.stream_from is not None
        if state.deterministic and step.regime is not None:
            streamed = step.regime in ("prefill", "long")
        else:
            streamed = step.rows >= state.stream_from
        if streamed:
            state.stream(self._gate_up, self._down).fill(self._gate_up, self._down)
            self._triton(step, acts)
        else:
            self._multiply(step.rows, acts)

    def _multiply(self, rows: int, acts: Activations) -> None:
        """acts.x plus the experts' sum, by the CPU kernels."""
        state, hidden, top_k = self._state, self._state.spec.hidden, self._state.spec.top_k
        room, at, choices = state.room(rows), rows * hidden, rows * top_k
        packed = room.device_in
        packed[:at].view(rows, hidden).copy_(acts.h)
        packed[at : at + choices].view(torch.int32).view(rows, top_k).copy_(acts.topk_ids)
        packed[at + choices : at + 2 * choices].view(rows, top_k).copy_(acts.topk_weights)
        launched(state.caller.image)
        state.link.copy(room.host_in, packed, at + 2 * choices)
        state.link.call(state.function, self._job(rows, room))
        state.link.copy(room.device_out, room.host_out, at)
        acts.x = acts.x.float() + room.device_out[:at].view(rows, hidden)

    def _job(self, rows: int, room: RowBuffers) -> native.ExpertJobStruct:
        if rows not in self._jobs:
            spec, address = self._state.spec, room.host_in.data_ptr()
            ids = address + 4 * rows * spec.hidden
            self._jobs[rows] = native.ExpertJobStruct(
                scratch=self._state.scratch(self._experts), experts=ctypes.pointer(self._experts), h=address, ids=ids,
                shares=ids + 4 * rows * spec.top_k, out=room.host_out.data_ptr(), rows=rows, failures=0,
            )  # fmt: skip
        return self._jobs[rows]

    def _crossover(self) -> int:
        """The fewest rows that are faster over the wire than on the CPU, as measured with this layer."""
        state, spec = self._state, self._state.spec
        stream = state.stream(self._gate_up, self._down)
        stream.fill(self._gate_up, self._down)  # the first time is not the pace
        wire = state.link.seconds(lambda: stream.fill(self._gate_up, self._down))
        for rows in TRIED_ROWS:
            room = state.room(rows)
            host_in = room.host_in
            at, choices = rows * spec.hidden, rows * spec.top_k
            host_in[:at] = 1.0
            ids = torch.arange(choices, dtype=torch.int32) % spec.experts
            host_in[at : at + choices] = ids.view(torch.float32)
            host_in[at + choices : at + 2 * choices] = 1.0 / spec.top_k
            began = time.perf_counter()
            state.caller.call(self._job(rows, room))
            if time.perf_counter() - began > wire:
                return rows
        return NEVER


class ExpertStream:
    """A layer's experts on the GPU, as Triton reads them, filled from host memory whenever a layer needs them."""

    def __init__(self, link: links.Link, device: torch.device, gate_up: MXTensor, down: MXTensor) -> None:
        self._link = link
        self.gate_up, self.down = _plain_like(gate_up, device), _plain_like(down, device)
        count = -(-gate_up.shape[0] // PIECES)
        size = count * max(gate_up.data[0].numel(), down.data[0].numel())
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(links.SLOTS)]
        self._count = count
        for slot in range(links.SLOTS):
            link.release(slot)

    def fill(self, gate_up: MXTensor, down: MXTensor) -> None:
        """Copy, piece after piece; the copy of a piece goes on while the one before it is unpacked."""
        pieces = [
            (source, target, first, min(source.shape[0], first + self._count))
            for source, target in ((gate_up, self.gate_up), (down, self.down))
            for first in range(0, source.shape[0], self._count)
        ]
        for number in range(min(links.SLOTS, len(pieces))):
            self._fetch(number, pieces[number])
        for number, (source, target, first, last) in enumerate(pieces):
            slot = number % links.SLOTS
            self._link.arrive(slot)
            packed = self._view(slot, source, last - first)
            shape = (last - first, *source.shape[1:])
            piece = convert(replace(source, data=packed, shape=shape), "plain")
            target.data[first:last].copy_(piece.data)
            target.scales[first:last].copy_(piece.scales)
            self._link.release(slot)
            if number + links.SLOTS < len(pieces):
                self._fetch(number + links.SLOTS, pieces[number + links.SLOTS])

    def _fetch(self, number: int, piece: tuple[MXTensor, MXTensor, int, int]) -> None:
        source, _, first, last = piece
        slot = number % links.SLOTS
        self._link.fetch(slot, self._view(slot, source, last - first), source.data[first:last])

    def _view(self, slot: int, source: MXTensor, experts: int) -> Tensor:
        one = source.data[0]
        return self._slots[slot][: experts * one.numel()].view(experts, *one.shape)


def _plain_like(m: MXTensor, device: torch.device) -> MXTensor:
    *lead, k = m.shape
    geometry = GEOMETRY[m.format]
    groups = geometry.padded(k) // geometry.group
    data = torch.zeros((*lead, groups * geometry.group_bytes), dtype=geometry.data_dtype, device=device)
    scales = torch.zeros((*lead, groups), dtype=geometry.scale_dtype, device=device)
    return MXTensor(data, scales, m.shape, m.format)


PHASES: tuple[Phase, ...] = (HybridMoe(),)
