"""FlashInfer's attention as a phase of our own engine: FA2 with sinks over our pages, which are its HND layout.

A step is planned on the host, once for each kind of layer, from tables that it reads back: so a CUDA graph cannot hold
it, and `--enforce-eager` must be asked for with `--attention flashinfer`. FlashInfer compiles two kernels when they are
first asked for (a minute or two, with nvcc). Prompts and decode steps run the same kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfbyte.gates import Gates
from halfbyte.kernels.borrowed.package import FLASHINFER
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

KERNEL = "flashinfer: batch_prefill_attention_sink (fa2)"
WORKSPACE = 128 << 20  # bytes, as FlashInfer asks for


class FlashInferAttention(Phase):
    name, covers, category = "borrowed.flashinfer_attention", ("attention",), "attention"
    backends = {"attention": "flashinfer"}
    knows = frozenset({"sinks", "window", "gqa", "uneven_layers"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if gates.attention != "flashinfer":
            return "is taken where --attention asks for it"
        if not arch.is_gpu:
            return "runs on a GPU"
        if gates.graphs == "on":
            return "plans every step on the host, which a CUDA graph cannot hold; add --enforce-eager"
        if spec.kv_dtype != "bf16":
            return f"reads keys and values in bf16, not {spec.kv_dtype}"
        if spec.head_dim not in (64, 128, 256):
            return f"is compiled for heads of 64, 128 and 256, not {spec.head_dim}"
        if "sinks" not in spec.features_of(("attention",)):
            return "is FlashInfer's kernel with sinks, and this model has none"
        return FLASHINFER.refuse(arch)

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(KERNEL, frozenset({FLASHINFER.version() or ""})),)

    def bind(self, b: Binding) -> Launch:
        spec, index, pool = b.spec, b.kind_index, b.kv_pool
        kind = b.kind or "full"
        planner = planner_of(b, kind)
        sinks, scale = b.weights.sinks.float(), spec.head_dim**-0.5
        image = KernelImage(KERNEL, FLASHINFER.version() or "", loaded=False)

        def launch(step: Step, acts: Activations) -> None:
            launched(image)
            pages = pool()
            out = planner.of(step, acts).run(
                acts.q.to(torch.bfloat16).contiguous(), (pages[:, index, 0], pages[:, index, 1]), sinks, scale
            )
            acts.attn = out.flatten(1)

        return launch


class Planner:
    """FlashInfer's plan of one kind of layer, made anew in the first layer of each step."""

    def __init__(self, workspace: Tensor, spec: Spec, kind: str) -> None:
        from flashinfer import BatchAttentionWithAttentionSinkWrapper

        self.spec, self.kind = spec, kind
        self.window = spec.window - 1 if kind == "sliding" else -1  # without the row itself
        self.wrapper: Any = BatchAttentionWithAttentionSinkWrapper(
            workspace,
            kv_layout="HND",
            backend="fa2",
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            head_dim_qk=spec.head_dim,
            head_dim_vo=spec.head_dim,
            window_left=self.window,
        )
        self._step: weakref.ref[Activations] | None = None  # one record of activations is one step

    def of(self, step: Step, acts: Activations) -> Any:
        if self._step is None or self._step() is not acts:
            self._step = weakref.ref(acts)
            s = self.spec
            starts, pages, last = table_of(step, self.kind, s.page_size)
            self.wrapper.plan(
                step.query_start,
                starts,
                pages,
                last,
                s.heads,
                s.kv_heads,
                s.head_dim,
                s.page_size,
                causal=True,
                window_left=self.window,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.bfloat16,
            )
        return self.wrapper


def table_of(step: Step, kind: str, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """(where each sequence's pages begin, the pages, tokens in each last page), as FlashInfer writes a table."""
    table, lens = step.block_tables[kind], step.kv_lens
    counts = (lens + page - 1) // page
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=lens.device)
    starts[1:] = counts.cumsum(0)
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return starts, table[used].int(), lens - (counts - 1) * page


_planners: Any = WeakIdKeyDictionary()  # workspace -> its planner: all layers of a kind share both


def planner_of(b: Binding, kind: str) -> Planner:
    name = f"flashinfer {kind}"
    if name not in b.buffers:
        b.buffers[name] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=b.weights.sinks.device)
    workspace = b.buffers[name]
    if workspace not in _planners:
        _planners[workspace] = Planner(workspace, b.spec, kind)
    planner: Planner = _planners[workspace]
    return planner


PHASES: tuple[Phase, ...] = (FlashInferAttention(),)
