"""The whole step on a CPU as one phase: every operation of every layer in one call into C++, for any number of rows.

Activations are rounded to int8 in groups of 32 in front of q8 and mxfp4 matrices, or stay float32 (the exact form); in
front of other matrices they are float32. Weights lie in the layout rows16 and are never dequantised. Refuses GPUs,
other activation formats, and machines on which the library cannot be had, with the reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.stored import Packer
from halfbyte.gates import Gates, preset_name
from halfbyte.kernels.cpu import library as native
from halfbyte.kernels.cpu.build import Unavailable, existing_file
from halfbyte.kernels.cpu.cores import threads_for
from halfbyte.kernels.cpu.packing import packer_of
from halfbyte.ops.attention import STORE_DTYPES
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import OPERATIONS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

MATRICES = ("qkv", "o", "gate_up", "down", "lm_head")
ACTIVATIONS = ("int8", "f32")
# KL of the next token against nothing rounded, through these kernels: `python training/costs.py`.
ROUNDING_COST = "measured on the embedded model together: 84 of 84 replies right as without, KL 3.4e-07 nats a token"
ROWS = 64  # that memory is made for at first; it doubles when a step has more


class CpuStep(Phase):
    name = "cpu.step"
    covers = OPERATIONS
    backends = {"moe": "cpu", "linear": "cpu", "attention": "cpu"}
    knows = frozenset(
        {"bias", "yarn", "sinks", "window", "gqa", "clamped_swiglu", "interleaved_gate_up", "uneven_layers"}
    )
    rank = 100
    category = "other"  # all of them at once
    taps = choices = True
    row_invariant = True
    mixes = True

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        why = refusal(spec, arch, gates, MATRICES)
        if why is None and spec.kv_dtype not in native.KV_FORMATS:
            return f"keeps keys and values in {', '.join(native.KV_FORMATS)}, not in {spec.kv_dtype}"
        return why

    def layouts(self, spec: Spec) -> dict[str, str]:
        return {"embed": "plain"} | dict.fromkeys(MATRICES, "rows16")

    def packer(self, gates: Gates) -> Packer | None:
        try:
            return packer_of(native.open_library(gates.cpu_instructions), threads_for(gates).count)
        except Unavailable as e:
            raise PlanError(f"the CPU kernels cannot run here: {e}.") from None

    def thread_counts(self) -> list[int]:
        return native.pool_sizes()

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return declared(kernel_name)

    def bind(self, b: Binding) -> Launch:
        return BoundStep(b).launch


def refusal(spec: Spec, arch: Arch, gates: Gates, matrices: Iterable[str]) -> str | None:
    """Why the library cannot multiply these matrices here."""
    if arch.is_gpu:
        return "runs on a CPU"
    if spec.activation not in ACTIVATIONS:
        return f"multiplies {' or '.join(ACTIVATIONS)} activations, not {spec.activation}"
    for role in matrices:
        if not native.FORMATS.keys() >= set(spec.matrices.kinds(role)):
            return f"{role} is {spec.matrices.text(role)}, and the layout rows16 holds {', '.join(native.FORMATS)}"
    try:
        native.open_library(gates.cpu_instructions)
    except Unavailable as e:
        return str(e)
    return None


def declared(kernel_name: Callable[[str], str]) -> list[Declared]:
    """The libraries that are built, as their files are now; `kernel_name`: what is called in one, by its set's name."""
    files = {instructions.name: existing_file(instructions) for instructions in native.usable_sets()}
    return [
        Declared(kernel_name(name), frozenset({native.file_hash(path)}))
        for name, path in files.items()
        if path is not None
    ]


def remark(gates: Gates, *, verbose: bool = False) -> str:
    """The CPU kernels of a plan, in one clause; empty where the reference was chosen. `verbose` adds the cost of
    rounding."""
    if "reference" in (gates.attention, *gates.moe_kernel, *gates.linear_kernel):
        return ""
    try:
        library = native.open_library(gates.cpu_instructions)
    except Unavailable as e:
        return f"without the CPU kernels, through the reference, which is far slower: {e}"
    count = threads_for(gates).count
    text = f"CPU kernels with {library.instructions}, {count} thread{'s' if count != 1 else ''}"
    if verbose and preset_name(gates, gpu=False) == "int8":
        text += f"; activations int8 and KV bf16, {ROUNDING_COST} (--preset exact keeps every bit)"
    return text


def kernel_name(instructions: str) -> str:
    return f"halfbyte_cpu.{instructions}: hb_run"


class BoundStep:
    """One model in the library: its struct, what the struct points to, and the memory of its steps."""

    def __init__(self, b: Binding) -> None:
        try:
            self._library = native.open_library(b.gates.cpu_instructions)
        except Unavailable as e:
            raise PlanError(f"the CPU kernels cannot run here: {e}.") from None
        self._pool = native.pool_of(self._library, threads_for(b.gates))
        self._image = KernelImage(kernel_name(self._library.instructions), self._library.module)
        self._keep: list[Tensor] = []
        self._spec, self._kv_pool, self._kv_dtype = b.spec, b.kv_pool, STORE_DTYPES[b.spec.kv_dtype]
        self._layers = (native.LayerStruct * b.spec.layers)(*(self._layer(b, i) for i in range(b.spec.layers)))
        self._model = self._make_model(b)
        self._instance = self._instance_for(ROWS)
        self._step = native.StepStruct()
        self._taps: dict[tuple[int, ...], Tensor] = {}

    # ---- the model ----------------------------------------------------------------------------

    def _make_model(self, b: Binding) -> native.ModelStruct:
        s, weights = b.spec, b.weights
        embed = weights.embed.contiguous()
        self._keep.append(embed)
        config = weights.config
        model = native.ModelStruct(
            abi=native.ABI,
            layers=s.layers,
            hidden=s.hidden,
            intermediate=s.intermediate,
            experts=s.experts,
            top_k=s.top_k,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            vocab=s.vocab,
            window=s.window,
            page_size=s.page_size,
            layers_per_page=config.layers_per_page,
            kv_format=native.KV_FORMATS[s.kv_dtype],
            embed_format=native.FORMATS[s.formats["embed"]],
            int8_activations=int(s.activation == "int8"),
            norm_eps=s.norm_eps,
            swiglu_limit=s.swiglu_limit,
            swiglu_alpha=s.swiglu_alpha,
            rope_inverse=self._floats(b.rope[0]),
            rope_temperature=b.rope[1],
            embed=embed.data_ptr(),
            final_norm=self._floats(weights.final_norm),
            lm_head=self._matrix(weights.lm_head, "lm_head"),
        )
        model.layer = ctypes.cast(self._layers, ctypes.POINTER(native.LayerStruct))
        return model

    def _layer(self, b: Binding, index: int) -> native.LayerStruct:
        w, config = b.weights.layers[index], b.weights.config
        sinks = "sinks" in b.spec.features_of(("attention",))
        return native.LayerStruct(
            attn_norm=self._floats(w.attn_norm),
            qkv=self._matrix(w.qkv, "qkv", index),
            qkv_bias=self._floats(w.qkv_bias),
            sinks=self._floats(w.sinks) if sinks else None,
            o=self._matrix(w.o, "o", index),
            o_bias=self._floats(w.o_bias),
            mlp_norm=self._floats(w.mlp_norm),
            router=self._floats(w.router),
            router_bias=self._floats(w.router_bias),
            gate_up=self._matrix(w.gate_up, "gate_up", index),
            gate_up_bias=self._floats(w.gate_up_bias),
            down=self._matrix(w.down, "down", index),
            down_bias=self._floats(w.down_bias),
            sliding=int(config.layer_kinds[index] == "sliding"),
            kind_index=config.kind_index(index),
        )

    def _matrix(self, m: MXTensor | DenseTiles | Tensor, role: str, layer: int | None = None) -> native.MatrixStruct:
        if isinstance(m, Tensor) or m.layout != "rows16":
            raise PlanError(f"the CPU kernels need {role} in the layout rows16.")
        form = self._spec.matrices.of(role, layer)
        self._keep.append(m.data)
        assert m.data.is_contiguous()
        return native.MatrixStruct(
            format=native.FORMATS[form], rows=m.shape[-2], cols=m.shape[-1], data=m.data.data_ptr()
        )

    def _floats(self, t: Tensor) -> int:
        t = t.float().contiguous()
        self._keep.append(t)
        return t.data_ptr()

    def _instance_for(self, rows: int) -> native.Instance:
        return native.Instance(self._library, self._model, self._pool, rows)

    # ---- a step -------------------------------------------------------------------------------

    def launch(self, step: Step, acts: Activations) -> None:
        rows, instance, s = step.rows, self._instance, self._step
        if rows > instance.most_rows:
            instance.close()
            self._instance = instance = self._instance_for(1 << (rows - 1).bit_length())
        sliding, full, pool = step.block_tables["sliding"], step.block_tables["full"], self._kv_pool()
        assert pool.dtype == self._kv_dtype
        assert sliding.stride() == full.stride() and full.stride(1) == 1  # noqa: PT018
        logit_count = step.logit_rows.shape[0]
        s.rows, s.sequences, s.logit_count, s.max_kv_len = rows, step.sequences, logit_count, step.max_kv_len
        s.tokens, s.positions = step.tokens.data_ptr(), step.positions.data_ptr()
        s.query_start, s.kv_lens = step.query_start.data_ptr(), step.kv_lens.data_ptr()
        s.row_sequence, s.logit_rows = step.row_sequence.data_ptr(), step.logit_rows.data_ptr()
        s.sliding_table, s.full_table, s.table_stride = sliding.data_ptr(), full.data_ptr(), full.stride(0)
        s.kv_pool, s.pages = pool.data_ptr(), pool.shape[0]
        s.logits = s.best = s.best_logit = s.taps = s.tap_layers = s.chosen = None
        s.tap_count = 0
        if step.best_only:
            acts.best = torch.empty(logit_count, dtype=torch.int32)
            acts.best_logit = torch.empty(logit_count)
            s.best, s.best_logit = acts.best.data_ptr(), acts.best_logit.data_ptr()
        else:
            acts.logits = torch.empty((logit_count, self._spec.vocab))
            s.logits = acts.logits.data_ptr()
        if step.taps:
            layers = self._taps.setdefault(step.taps, torch.tensor(step.taps, dtype=torch.int32))
            acts.taps = torch.empty((len(step.taps), rows, self._spec.hidden))
            s.tap_layers, s.tap_count, s.taps = layers.data_ptr(), len(step.taps), acts.taps.data_ptr()
        if step.choices:
            acts.choices = torch.empty((self._spec.layers, rows, self._spec.top_k), dtype=torch.int32)
            s.chosen = acts.choices.data_ptr()
        launched(self._image)
        instance.run(s)


PHASES: tuple[Phase, ...] = (CpuStep(),)
