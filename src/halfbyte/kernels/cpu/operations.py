"""Single operations on a CPU as phases: qkv, o, the experts and lm_head, for an engine that runs the rest itself.

The whole step of `phase.py` is what our own engine takes. These go through the same products with the same bits, one
call into C++ each, and refuse what it refuses. Weights lie in the layout rows16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from halfbyte.errors import EngineError, NotEnoughMemoryError, PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.cpu.build import Unavailable
from halfbyte.kernels.cpu.cores import Threads, threads_for
from halfbyte.kernels.cpu.phase import declared, refusal
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import ROLES, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

Project = Callable[[Tensor], Tensor]  # float32 [rows, k] -> float32 [rows, n]


class CpuOperation(Phase):
    rank = 100
    entry: str  # of the library

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refusal(spec, arch, gates, ROLES[self.covers[0]])

    def layouts(self, spec: Spec) -> dict[str, str]:
        return dict.fromkeys(ROLES[self.covers[0]], "rows16")

    def thread_counts(self) -> list[int]:
        return native.pool_sizes()

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared(lambda instructions: kernel_name(instructions, self.entry))


def kernel_name(instructions: str, entry: str) -> str:
    return f"halfbyte_cpu.{instructions}: {entry}"


class Caller:
    """The library of a binding, its threads, and the error text of its calls."""

    def __init__(self, b: Binding, entry: str, threads: Threads | None = None) -> None:
        try:
            self.library = native.open_library(b.gates.cpu_instructions)
        except Unavailable as e:
            raise PlanError(f"the CPU kernels cannot run here: {e}.") from None
        self.pool = native.pool_of(self.library, threads or threads_for(b.gates))
        self.image = KernelImage(kernel_name(self.library.instructions, entry), self.library.module)
        self.call = getattr(self.library.calls, entry)
        self.error = ctypes.create_string_buffer(native.ERROR_BYTES)
        self.spec = b.spec

    def run(self, *arguments: object) -> None:
        launched(self.image)
        if self.call(*arguments, self.error, native.ERROR_BYTES):
            raise EngineError(f"the CPU kernels refused rows: {self.error.value.decode(errors='replace')}")

    def matrix(self, m: MXTensor | DenseTiles | Tensor, role: str) -> native.MatrixStruct:
        if isinstance(m, Tensor) or m.layout != "rows16":
            raise PlanError(f"the CPU kernels need {role} in the layout rows16.")
        assert m.data.is_contiguous(), f"{role} is not whole"
        form = native.FORMATS[self.spec.formats[role]]
        return native.MatrixStruct(format=form, rows=m.shape[-2], cols=m.shape[-1], data=m.data.data_ptr())


def product_of(b: Binding, role: str, bias: Tensor | None) -> Project:
    caller, weights = Caller(b, "hb_run_product"), getattr(b.weights, role)
    matrix, offset = caller.matrix(weights, role), None if bias is None else bias.float().contiguous()
    int8, n = int(b.spec.activation == "int8"), matrix.rows

    def project(x: Tensor) -> Tensor:
        assert weights.data.numel(), "kept alive with the launch"
        x = x.float().contiguous()
        out = torch.empty((x.shape[0], n))
        caller.run(
            caller.pool,
            matrix,
            None if offset is None else offset.data_ptr(),
            int8,
            x.shape[0],
            x.data_ptr(),
            out.data_ptr(),
        )
        return out

    return project


class CpuQkv(CpuOperation):
    name, covers, category, entry = "cpu.qkv", ("qkv",), "linear", "hb_run_product"
    backends = {"linear": "cpu"}
    knows = frozenset({"bias"})

    def bind(self, b: Binding) -> Launch:
        project, s = product_of(b, "qkv", b.weights.qkv_bias), b.spec
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = project(acts.h).view(-1, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class CpuOut(CpuOperation):
    name, covers, category, entry = "cpu.o", ("o",), "linear", "hb_run_product"
    backends = {"linear": "cpu"}
    knows = frozenset({"bias"})

    def bind(self, b: Binding) -> Launch:
        project = product_of(b, "o", b.weights.o_bias)

        def launch(step: Step, acts: Activations) -> None:
            y = project(acts.attn)
            acts.x = y if acts.x is None else acts.x + y

        return launch


class CpuLmHead(CpuOperation):
    name, covers, category, entry = "cpu.lm_head", ("lm_head",), "linear", "hb_run_product"
    backends = {"linear": "cpu"}

    def bind(self, b: Binding) -> Launch:
        project = product_of(b, "lm_head", None)

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = project(acts.h)

        return launch


class CpuMoe(CpuOperation):
    name, covers, category, entry = "cpu.moe", ("moe",), "moe", "hb_run_experts"
    backends = {"moe": "cpu"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def bind(self, b: Binding) -> Launch:
        w, caller = b.weights, Caller(b, self.entry)
        biases = w.gate_up_bias.float().contiguous(), w.down_bias.float().contiguous()
        experts = experts_struct(caller, w.gate_up, w.down, biases, int8=b.spec.activation == "int8")

        def launch(step: Step, acts: Activations) -> None:
            assert len(biases) == 2 and w.gate_up.data.numel(), "kept alive with the launch"  # noqa: PT018
            h, ids, shares = acts.h.float().contiguous(), acts.topk_ids.int(), acts.topk_weights.float()
            scratch = _scratch_for(caller, experts, h.shape[0])
            out = torch.empty_like(h)
            caller.run(
                scratch,
                experts,
                h.shape[0],
                h.data_ptr(),
                ids.contiguous().data_ptr(),
                shares.contiguous().data_ptr(),
                out.data_ptr(),
            )
            acts.x = out if acts.x is None else acts.x + out

        return launch


def experts_struct(
    caller: Caller,
    gate_up: MXTensor | DenseTiles,
    down: MXTensor | DenseTiles,
    biases: tuple[Tensor, Tensor],
    *,
    int8: bool,
) -> native.ExpertsStruct:
    """The experts of one layer for the library. The caller keeps the matrices and the biases, float32, alive."""
    s = caller.spec
    return native.ExpertsStruct(
        hidden=s.hidden,
        intermediate=s.intermediate,
        experts=s.experts,
        top_k=s.top_k,
        int8_activations=int(int8),
        swiglu_limit=s.swiglu_limit,
        swiglu_alpha=s.swiglu_alpha,
        gate_up=caller.matrix(gate_up, "gate_up"),
        gate_up_bias=biases[0].data_ptr(),
        down=caller.matrix(down, "down"),
        down_bias=biases[1].data_ptr(),
    )


_scratches: dict[tuple[object, ...], tuple[int, int]] = {}  # shape -> (rows, address); all layers of it share one


def _scratch_for(caller: Caller, e: native.ExpertsStruct, rows: int) -> int:
    """Scratch memory for at least `rows` rows. It lives as long as the process."""
    key = (
        caller.library.module,
        caller.pool,
        e.hidden,
        e.intermediate,
        e.experts,
        e.top_k,
        e.swiglu_limit,
        e.swiglu_alpha,
    )
    room, address = _scratches.get(key, (0, 0))
    if rows > room or not address:
        room = max(64, 1 << max(0, rows - 1).bit_length())
        handle = caller.library.calls.hb_scratch_create(e, caller.pool, room, caller.error, native.ERROR_BYTES)
        if not handle:
            raise NotEnoughMemoryError(f"the CPU kernels have no memory: {caller.error.value.decode(errors='replace')}")
        if address:
            caller.library.calls.hb_scratch_destroy(address)
        address = handle
        _scratches[key] = room, address
    return address


PHASES: tuple[Phase, ...] = (CpuQkv(), CpuOut(), CpuMoe(), CpuLmHead())
