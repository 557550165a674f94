"""Phase: one way of running one or more consecutive operations, and the facts it is chosen by.

A phase says what it covers, refuses what it cannot do with a reason, names the physical layout it needs for each
weight, and binds to weights and buffers once; the launch it returns runs every step. It never converts a format,
never falls back, and never reads the environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from halfbyte.formats.stored import Packer
from halfbyte.gates import Gates
from halfbyte.plan.activations import Activations
from halfbyte.plan.record import Declared
from halfbyte.plan.step import REGIMES, Regime, RegimeLimits, Step

PROLOGUE = ("embed",)
LAYER = ("attn_norm", "qkv", "rope", "kv_write", "attention", "o", "mlp_norm", "router", "moe")
EPILOGUE = ("final_norm", "lm_head")
SEGMENTS = (PROLOGUE, LAYER, EPILOGUE)
OPERATIONS = PROLOGUE + LAYER + EPILOGUE
ALL_LAYERS = PROLOGUE + LAYER

# Which axis of the gates chooses the kernel of an operation; operations without one follow their neighbours.
AXIS = {"qkv": "linear", "o": "linear", "lm_head": "linear", "moe": "moe", "attention": "attention"}
# Which weights an operation reads: the roles of model.weights.LayerWeights and Weights.
ROLES: dict[str, tuple[str, ...]] = {
    "embed": ("embed",),
    "qkv": ("qkv",),
    "o": ("o",),
    "moe": ("gate_up", "down"),
    "lm_head": ("lm_head",),
}
# Which layer group (--layers) a role belongs to.
GROUP = {"qkv": "qkv", "o": "o", "gate_up": "moe", "down": "moe", "lm_head": "lm_head"}


@dataclass(frozen=True)
class Arch:
    """A machine to run on. `capability` is None on a CPU."""

    name: str  # cpu, sm90, sm100, sm120, sm121
    capability: tuple[int, int] | None = None
    shared_memory: int = 0  # bytes one block may use
    limits: RegimeLimits = field(kw_only=True)

    @property
    def is_gpu(self) -> bool:
        return self.capability is not None


_H200 = RegimeLimits(
    decode=3, batch=64, long=3072,
    source="measured on an H200: up to 3 rows the decode step is faster than the batch kernels; from 3072 rows on fp8 "
    "activations are 11 % faster, at 2048 rows 2 % slower (docs/LOG.md)",
)  # fmt: skip
_CARRIED_OVER = replace(_H200, source="an H200's, carried over: not measured on this architecture")
_CPU = RegimeLimits(
    decode=8, batch=64, long=4096,
    source="names only: on a CPU one call runs a step of any number of rows",
)  # fmt: skip

ARCHES: dict[str, Arch] = {
    "cpu": Arch("cpu", limits=_CPU),
    "sm90": Arch("sm90", (9, 0), 232_448, limits=_H200),
    "sm100": Arch("sm100", (10, 0), 232_448, limits=_CARRIED_OVER),
    "sm120": Arch("sm120", (12, 0), 101_376, limits=_CARRIED_OVER),
    "sm121": Arch("sm121", (12, 1), 101_376, limits=_CARRIED_OVER),
}


@dataclass(frozen=True)
class Spec:
    """Everything about the model and the gates that changes what an operation computes.

    `features` are the parts of an operation's meaning that a phase must know by name; one that it does not know is
    a refusal, so a new feature of a model cannot be dropped in silence.
    """

    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    norm_eps: float
    swiglu_limit: float
    swiglu_alpha: float
    formats: Mapping[str, str]  # role -> bf16, f16, f32, q8, mxfp4: what the weights are
    features: Mapping[str, frozenset[str]]  # operation -> features
    dtype: str  # residual stream and dense activations: f32 or bf16
    activation: str  # quantisation point in front of quantised matrices
    kv_dtype: str  # f32, bf16, fp8
    page_size: int
    max_context: int = 131072  # positions go up to here: tables over them end there
    tile: str = "auto"
    activations: Mapping[str, str] = field(default_factory=dict)  # regime -> activation, where it is another one

    def at(self, regime: str) -> Spec:
        """What holds in one regime: the spec that a phase is asked about, and bound with, there."""
        if not self.activations:
            return self
        return replace(self, activation=self.activations.get(regime, self.activation), activations={})

    def features_of(self, covers: tuple[str, ...]) -> frozenset[str]:
        return frozenset().union(*(self.features.get(op, frozenset()) for op in covers))


@dataclass
class Binding:
    """What a phase gets when it is bound: one layer's weights (or the model's, outside layers) and shared state."""

    spec: Spec
    weights: Any  # model.weights.LayerWeights in a layer, Weights outside and for a whole-step phase
    kind: str | None  # sliding or full, in a layer
    kind_index: int  # place of this layer inside a KV page
    rope: tuple[Tensor, float]  # inverse frequencies, temperature
    kv_pool: Callable[[], Tensor]  # the pool may be made after the phases are bound
    buffers: dict[str, Tensor] = field(default_factory=dict)  # fixed buffers, shared by name over all phases
    layer: int | None = None
    layer_pools: Callable[[], Sequence[Tensor]] | None = None  # of every layer, where the engine holds them apart
    gates: Gates = field(default_factory=Gates)


Launch = Callable[[Step, Activations], None]


class Phase(ABC):
    """Subclasses set the class attributes. One phase, one file.

    `covers` lies within one segment, or is all of OPERATIONS (a persistent kernel that runs the whole step), or
    ALL_LAYERS (the same without the head).
    """

    name: str
    covers: tuple[str, ...]
    backends: Mapping[str, str | tuple[str, ...]] = {}  # axis -> the gate value (or values) this phase answers to
    regimes: frozenset[Regime] = frozenset(REGIMES)
    knows: frozenset[str] = frozenset()
    rank: int = 0  # auto prefers the higher
    reference: bool = False  # never taken by auto on a GPU
    tiles: tuple[str, ...] = ("auto",)  # values of --tile that it follows
    taps: bool = False  # runs all layers in one piece, and leaves what a step's `taps` and `choices` ask for
    category: str = "other"  # of its time in a profile: moe, linear, attention, norm, router, quantise, sample, other

    def answers(self, axis: str) -> tuple[str, ...]:
        """The gate values of an axis that ask for this phase."""
        names = self.backends[axis]
        return (names,) if isinstance(names, str) else names

    @abstractmethod
    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        """Why this phase cannot run here, in one clause; None if it can. Gate and feature checks are done for it."""

    def layouts(self, spec: Spec) -> dict[str, str]:
        """Role -> layout name, for every role of ROLES[op] it reads."""
        return {role: "plain" for op in self.covers for role in ROLES.get(op, ())}

    def packer(self, gates: Gates) -> Packer | None:
        """What brings weights from files into its layout while they are read; None: they are read, then laid out."""
        return None

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        """Every kernel it may launch there, with the hashes of their binaries as the compiler gave them. The record of
        what ran is held against it (`plan.record`), so it must not be read off a launch."""
        return ()

    def compilations(self, spec: Spec, arch: Arch) -> Iterable[Callable[[], object]]:
        """What can be compiled for it without a weight being there, each by itself and on any thread; what comes of it
        lies where `bind` or the first launch looks."""
        return ()

    @abstractmethod
    def bind(self, binding: Binding) -> Launch: ...
