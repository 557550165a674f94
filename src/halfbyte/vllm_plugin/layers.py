"""Our plan inside vLLM: our kernels run every layer of a step over vLLM's pages, then the LM head.

vLLM schedules, owns the pages and samples. Everything between a token and its logits is ours, as in our own engine:
the decode step in one launch, the layers of batches and of prompts. vLLM keeps the pages of each layer apart and calls
the head separately, and the plan is bound accordingly. This module does not import vLLM: `compat_model.py` passes in
weights, pages and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from halfbyte.errors import GateError, PlanError
from halfbyte.gates import Gates
from halfbyte.kernels.lent import LAYER_PHASES
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import EPILOGUE, Arch, Binding, Spec
from halfbyte.plan.plan import Plan, bind
from halfbyte.plan.record import Record, Runs, Selection
from halfbyte.plan.reference import PHASES as REFERENCE
from halfbyte.plan.select import Chosen, select
from halfbyte.plan.step import Step
from halfbyte.vllm_plugin import selection as operations
from halfbyte.vllm_plugin.selection import Shapes

PAGE = 64
Unit = Literal["layers", "operations"]
UNITS = ("auto", "layers", "operations")
VLLM_KERNELS = ("vllm", "marlin", "cutlass")  # kernels that vLLM runs
VLLM_ATTENTION = ("triton", "flashinfer", "flash_attn")


@dataclass(frozen=True)
class Choice:
    """What runs inside vLLM, and why it is not all layers."""

    unit: Unit
    spec: Spec
    chosen: Chosen
    selection: Selection
    why: str = ""  # why the layers are not ours


def choose(shapes: Shapes, gates: Gates, arch: Arch, *, unit: str = "auto", obstacle: str = "") -> Choice:
    """The largest unit that can run: all layers, or single operations. `obstacle`: a setting of vLLM that our layers do
    not support. A unit selected by name is used, or a PlanError says why it cannot be."""
    if unit not in UNITS:
        raise GateError(f"the unit in --additional-config is {unit!r}; use one of {', '.join(UNITS)}.")
    why = obstacle or _vllm_kernel_in(gates)
    if not why and unit == "auto" and not arch.is_gpu:
        why = "a CPU has no kernels for whole layers over vLLM's pages"
    if unit == "operations":
        why = "the unit is set to operations"
    elif unit == "layers" and why:
        raise PlanError(f"halfbyte's layers cannot run inside vLLM here: {why}; leave the unit at auto.")
    if not why:
        try:
            return Choice("layers", *choose_layers(shapes, gates, arch))
        except PlanError as e:
            if unit == "layers":
                raise
            why = str(e)
    return Choice("operations", *operations.choose(shapes, gates, arch), why)


def _vllm_kernel_in(gates: Gates) -> str:
    for flag, kernels in (("--moe-kernel", gates.moe_kernel), ("--linear-kernel", gates.linear_kernel)):
        for kernel in kernels:
            if kernel in VLLM_KERNELS:
                return f"{flag} asks for {kernel}, which is vLLM's"
    if gates.attention in VLLM_ATTENTION:
        return f"--attention asks for {gates.attention}, which is vLLM's"
    return ""


def choose_layers(shapes: Shapes, gates: Gates, arch: Arch) -> tuple[Spec, Chosen, Selection]:
    spec = replace(operations.spec_of(shapes, gates, arch), page_size=PAGE, max_context=shapes.max_context)
    if gates.kv_dtype == "auto":
        spec = replace(spec, kv_dtype=shapes.dense)
    chosen, selection = select(spec, arch, gates, (*LAYER_PHASES, *REFERENCE))
    return spec, chosen, selection


class LayerModel:
    """A plan bound to weights that vLLM has loaded, and to its pages."""

    def __init__(
        self,
        choice: Choice,
        gates: Gates,
        arch: Arch,
        weights: Any,  # with `layers`, as model.weights.Weights has them
        rope: tuple[Tensor, float],
        pages: Callable[[int], Tensor],
        record: Record,
        into: Callable[[Plan, int], Runs],
    ) -> None:
        """`pages(layer)`: its pages, [pages, 1, 2, kv_heads, 64, head_dim]. `into(plan, rows)`: the counters in
        `record` for the launches of a plan with that many rows."""
        self.record, self.into = record, into
        self.spec, self.weights, self.rope, self.pages = choice.spec, weights, rope, pages
        self.gates, self.arch = gates, arch
        self.buffers: dict[str, Tensor] = {}
        plan = bind(choice.chosen, choice.selection, choice.spec, arch, self._binding)
        head = {regime: [b for b in bound if b.phase.covers[0] in EPILOGUE] for regime, bound in plan.bound.items()}
        body = {regime: bound[: len(bound) - len(head[regime])] for regime, bound in plan.bound.items()}
        self.body, self.head = (replace(plan, bound=part, record=record) for part in (body, head))
        device = weights.embed.device
        self._indices = torch.arange(1, dtype=torch.int32, device=device)

    def _binding(self, layer: int | None) -> Binding:
        return Binding(
            spec=self.spec,
            weights=self.weights if layer is None else self.weights.layers[layer],
            kind=None if layer is None else kind_of(layer),
            kind_index=0,
            rope=self.rope,
            kv_pool=_no_pool if layer is None else lambda: self.pages(layer),
            buffers=self.buffers,
            layer=layer,
            layer_pools=lambda: [self.pages(i) for i in range(self.spec.layers)],
            gates=self.gates,
        )

    def indices(self, count: int) -> Tensor:
        """0, 1, 2 … as int32, at a stable address."""
        if self._indices.shape[0] < count:
            self._indices = torch.arange(max(count, 1024), dtype=torch.int32, device=self._indices.device)
        return self._indices[:count]

    def run(self, step: Step) -> Tensor:
        """The residual stream behind the last layer, float32 [rows, hidden]."""
        self.record.into = self.into(self.body, step.rows)
        return self.body.run(step).x

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocab], of rows of the residual stream."""
        rows = x.shape[0]
        indices = self.indices(rows)
        step = Step(indices, indices, indices, indices, indices, {}, indices, max_kv_len=0)
        self.record.into = self.into(self.head, rows)
        return self.head.run(step, Activations(x=x)).logits


def _no_pool() -> Tensor:
    raise AssertionError("pages belong to a layer")


def kind_of(layer: int) -> str:
    return "sliding" if layer % 2 == 0 else "full"


def layers_of(by_layer: Mapping[int | None, Mapping[str, Any]], count: int) -> Any:
    """The weights in the form that phases read, from weights by layer and role."""
    layers = [SimpleNamespace(**by_layer[i]) for i in range(count)]
    return SimpleNamespace(layers=layers, **by_layer[None])


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VllmBatch:
    """vLLM's description of a step for one kind of layer."""

    table: Tensor  # int32 [sequences, blocks]
    query_start: Tensor  # int32 [sequences + 1]
    query_start_host: Tensor  # `query_start` on the host
    lengths: Tensor  # int32 [sequences], this step's tokens included; 0: padding
    rows: int
    longest_query: int
    longest: int  # the host's bound on `lengths`


def step_of(model: LayerModel, tokens: Tensor, positions: Tensor, batches: Mapping[str, VllmBatch]) -> Step:
    """vLLM's batches as our `Step`. Padding rows are sequences of length 0 on vLLM's null block, page 0."""
    full = batches["full"]
    rows, sequences = full.rows, full.lengths.shape[0]
    tables = {kind: b.table for kind, b in batches.items()}
    if full.longest_query == 1 and rows == sequences:  # every row a sequence: nothing here depends on the host
        indices = model.indices(rows + 1)
        at = (full.lengths - 1).clamp_min_(0)
        return Step(
            tokens=tokens[:rows].int(),
            positions=at,
            query_start=indices,
            kv_lens=full.lengths,
            row_sequence=indices[:rows],
            block_tables=tables,
            logit_rows=indices[:rows],
            max_kv_len=full.longest,
            singles=rows,
        )
    row_sequence = torch.bucketize(model.indices(rows), full.query_start[1:], right=True, out_int32=True)
    counts = full.query_start_host.diff()
    more = (counts != 1).nonzero()
    singles = int(more[0]) if more.numel() else sequences
    return Step(
        tokens=tokens[:rows].int(),
        positions=positions[:rows].int(),
        query_start=full.query_start,
        kv_lens=full.lengths,
        row_sequence=row_sequence,
        block_tables=tables,
        logit_rows=model.indices(rows),
        max_kv_len=full.longest,
        singles=singles,
    )


def idle_step(model: LayerModel, rows: int, longest: int) -> Step:
    """The step that vLLM runs to measure memory before there are pages: prompts on page 0."""
    indices = model.indices(rows + 1)
    count = max(1, min(rows, longest))
    starts = torch.arange(0, rows, count)
    ends = torch.cat([starts, torch.tensor([rows])]).int()
    start = ends.to(indices.device)
    row_sequence = torch.bucketize(indices[:rows], start[1:], right=True, out_int32=True)
    table = torch.zeros((len(starts), -(-count // PAGE)), dtype=torch.int32, device=indices.device)
    return Step(
        tokens=torch.zeros_like(indices[:rows]),
        positions=indices[:rows] % count,
        query_start=start,
        kv_lens=start.diff(),
        row_sequence=row_sequence,
        block_tables={"sliding": table, "full": table},
        logit_rows=indices[:rows],
        max_kv_len=count,
    )
