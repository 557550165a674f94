"""Our own plan inside vLLM: every layer of a step by our kernels, over vLLM's own pages; then the head.

vLLM schedules, keeps the pages and samples; between a token and its logits everything is ours, as in our own engine:
the decode step in one launch, the batch's and the prompt's layers. What vLLM holds apart (the pages of each layer, the
head behind the hidden states) is bound as such. Knows no vLLM: `compat_model.py` hands in weights, pages and tables.
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
THEIRS = ("vllm", "marlin", "cutlass")  # kernels of the step's operations that are vLLM's to run
THEIR_ATTENTION = ("triton", "flashinfer", "flash_attn")


@dataclass(frozen=True)
class Choice:
    """What runs inside vLLM, and why it is no larger part of a step."""

    unit: Unit
    spec: Spec
    chosen: Chosen
    selection: Selection
    why: str = ""  # the layers are not ours


def choose(shapes: Shapes, gates: Gates, arch: Arch, *, unit: str = "auto", obstacle: str = "") -> Choice:
    """The largest unit that can be had: all layers, or single operations. `obstacle`: what vLLM was asked for that our
    layers do not have. A unit that was asked for by name is taken, or a PlanError says why it cannot be."""
    if unit not in UNITS:
        raise GateError(f"the unit in --additional-config is one of {', '.join(UNITS)}, not {unit!r}.")
    why = obstacle or _theirs(gates)
    if not why and unit == "auto" and not arch.is_gpu:
        why = "a CPU has no kernels for whole layers over vLLM's pages"
    if unit == "operations":
        why = "single operations were asked for"
    elif unit == "layers" and why:
        raise PlanError(f"our layers cannot run inside vLLM here: {why}; leave the unit at auto.")
    if not why:
        try:
            return Choice("layers", *choose_layers(shapes, gates, arch))
        except PlanError as e:
            if unit == "layers":
                raise
            why = str(e)
    return Choice("operations", *operations.choose(shapes, gates, arch), why)


def _theirs(gates: Gates) -> str:
    for flag, kernels in (("--moe-kernel", gates.moe_kernel), ("--linear-kernel", gates.linear_kernel)):
        for kernel in kernels:
            if kernel in THEIRS:
                return f"{flag} asks for {kernel}, which is vLLM's"
    if gates.attention in THEIR_ATTENTION:
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
        """`pages`: those of a layer, [pages, 1, 2, kv_heads, 64, head_dim]. `into`: where launches of a plan with so
        many rows count, in `record`."""
        self.record, self.into = record, into
        self.spec, self.weights, self.rope, self.pages = choice.spec, weights, rope, pages
        self.gates, self.arch = gates, arch
        self.buffers: dict[str, Tensor] = {}
        plan = bind(choice.chosen, choice.selection, choice.spec, arch, self._binding)
        head = {regime: [b for b in bound if b.phase.covers[0] in EPILOGUE] for regime, bound in plan.bound.items()}
        body = {regime: bound[: len(bound) - len(head[regime])] for regime, bound in plan.bound.items()}
        self.body, self.head = (replace(plan, bound=part, record=record) for part in (body, head))
        device = weights.embed.device
        self._each = torch.arange(1, dtype=torch.int32, device=device)

    def _binding(self, layer: int | None) -> Binding:
        return Binding(
            spec=self.spec, weights=self.weights if layer is None else self.weights.layers[layer],
            kind=None if layer is None else kind_of(layer), kind_index=0, rope=self.rope,
            kv_pool=_no_pool if layer is None else lambda: self.pages(layer), buffers=self.buffers, layer=layer,
            layer_pools=lambda: [self.pages(i) for i in range(self.spec.layers)], gates=self.gates,
        )  # fmt: skip

    def each(self, count: int) -> Tensor:
        """0, 1, 2 … as int32, in memory that stays."""
        if self._each.shape[0] < count:
            self._each = torch.arange(max(count, 1024), dtype=torch.int32, device=self._each.device)
        return self._each[:count]

    def run(self, step: Step) -> Tensor:
        """The residual stream behind the last layer, float32 [rows, hidden]."""
        self.record.into = self.into(self.body, step.rows)
        return self.body.run(step).x

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocab], of rows of the residual stream."""
        rows = x.shape[0]
        each = self.each(rows)
        step = Step(each, each, each, each, each, {}, each, max_kv_len=0)
        self.record.into = self.into(self.head, rows)
        return self.head.run(step, Activations(x=x)).logits


def _no_pool() -> Tensor:
    raise AssertionError("pages belong to a layer")


def kind_of(layer: int) -> str:
    return "sliding" if layer % 2 == 0 else "full"


def layers_of(by_layer: Mapping[int | None, Mapping[str, Any]], count: int) -> Any:
    """The weights as phases read them, from what was handed in layer by layer."""
    layers = [SimpleNamespace(**by_layer[i]) for i in range(count)]
    return SimpleNamespace(layers=layers, **by_layer[None])


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What vLLM says about one kind of layer in a step."""

    table: Tensor  # int32 [sequences, blocks]
    query_start: Tensor  # int32 [sequences + 1]
    query_start_host: Tensor  # the same on the host
    lengths: Tensor  # int32 [sequences], this step's tokens included; 0: padding
    rows: int
    longest_query: int
    longest: int  # the host's bound on `lengths`


def step_of(model: LayerModel, tokens: Tensor, positions: Tensor, batches: Mapping[str, Batch]) -> Step:
    """A step of ours. Padding rows are sequences of length 0 on vLLM's null block, which is page 0."""
    full = batches["full"]
    rows, sequences = full.rows, full.lengths.shape[0]
    tables = {kind: b.table for kind, b in batches.items()}
    if full.longest_query == 1 and rows == sequences:  # every row a sequence: nothing here depends on the host
        each = model.each(rows + 1)
        at = (full.lengths - 1).clamp_min_(0)
        return Step(
            tokens=tokens[:rows].int(), positions=at, query_start=each, kv_lens=full.lengths, row_sequence=each[:rows],
            block_tables=tables, logit_rows=each[:rows], max_kv_len=full.longest, singles=rows,
        )  # fmt: skip
    row_sequence = torch.bucketize(model.each(rows), full.query_start[1:], right=True, out_int32=True)
    counts = full.query_start_host.diff()
    more = (counts != 1).nonzero()
    singles = int(more[0]) if more.numel() else sequences
    return Step(
        tokens=tokens[:rows].int(), positions=positions[:rows].int(), query_start=full.query_start,
        kv_lens=full.lengths, row_sequence=row_sequence, block_tables=tables, logit_rows=model.each(rows),
        max_kv_len=full.longest, singles=singles,
    )  # fmt: skip


def idle_step(model: LayerModel, rows: int, longest: int) -> Step:
    """What vLLM runs to see how much memory a step takes, before there are pages: prompts on page 0."""
    each = model.each(rows + 1)
    count = max(1, min(rows, longest))
    starts = torch.arange(0, rows, count)
    ends = torch.cat([starts, torch.tensor([rows])]).int()
    start = ends.to(each.device)
    row_sequence = torch.bucketize(each[:rows], start[1:], right=True, out_int32=True)
    table = torch.zeros((len(starts), -(-count // PAGE)), dtype=torch.int32, device=each.device)
    return Step(
        tokens=torch.zeros_like(each[:rows]), positions=each[:rows] % count, query_start=start,
        kv_lens=start.diff(), row_sequence=row_sequence, block_tables={"sliding": table, "full": table},
        logit_rows=each[:rows], max_kv_len=count,
    )  # fmt: skip
