"""Phases for an engine that runs the rest of a step itself: vLLM, with our plugin in it. One operation each, or layers.

qkv and lm_head come without the norm in front of them, which such an engine has run already; o and the experts are the
phases that our own engine can take, too. Where all layers are ours (`LAYER_PHASES`) they are our own engine's, but for
the step in one piece with its head. Each refuses what its kernels refuse.
"""

from __future__ import annotations

import torch

from halfbyte.kernels.catalog import PHASES as CATALOG
from halfbyte.kernels.cpu.operations import PHASES as CPU
from halfbyte.kernels.cuda.decode.layers_phase import PHASES as DECODE_LAYERS
from halfbyte.kernels.cuda.prefill import fp8, mx, phases, sync
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedPhase, GroupedQkv
from halfbyte.kernels.triton.phases import PHASES as TRITON
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import OPERATIONS as ALL_OPERATIONS
from halfbyte.plan.phase import Binding, Launch, Phase
from halfbyte.plan.step import Step

OPERATIONS = ("qkv", "o", "moe", "lm_head")


class BareQkv(GroupedQkv):
    name = "cuda.grouped_qkv"
    covers = ("qkv",)  # type: ignore[assignment]

    def bind(self, b: Binding) -> Launch:
        s = b.spec
        dense = self.bind_dense(b, "qkv")
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = dense.run(acts.h).view(-1, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class BareHead(GroupedHead):
    name = "cuda.grouped_lm_head"
    covers = ("lm_head",)  # type: ignore[assignment]

    def bind(self, b: Binding) -> Launch:
        dense = self.bind_dense(b, "lm_head")

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = dense.run(acts.h)

        return launch


def _bare(kind: type[GroupedPhase]) -> Phase:
    """A phase of grouped products without the norm in front."""
    base = BareQkv if issubclass(kind, GroupedQkv) else BareHead
    bare = type(f"Bare{kind.__name__}", (base, kind), {"name": kind.name.replace("norm_", "")})
    phase: Phase = bare()
    return phase


BARE: tuple[Phase, ...] = tuple(
    _bare(type(phase))
    for module in (phases, sync, mx, fp8)
    for phase in module.PHASES
    if isinstance(phase, GroupedQkv | GroupedHead)
)
PHASES: tuple[Phase, ...] = (
    *BARE,
    *(p for module in (phases, sync, mx, fp8) for p in module.PHASES if len(p.covers) == 1),
    *(p for p in TRITON if len(p.covers) == 1 and p.covers[0] in OPERATIONS),
    *CPU,
)
LAYER_PHASES: tuple[Phase, ...] = (
    *DECODE_LAYERS,
    *(p for p in CATALOG if p.covers != ALL_OPERATIONS and not p.name.startswith("borrowed.")),
    *CPU,
)
