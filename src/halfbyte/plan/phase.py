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

from halfbyte.architectures import ARCHES as ARCHES
from halfbyte.architectures import Arch as Arch
from halfbyte.formats.matrices import Formats
from halfbyte.formats.stored import Packer
from halfbyte.gates import Gates
from halfbyte.plan.activations import Activations
from halfbyte.plan.record import Declared
from halfbyte.plan.step import REGIMES, Regime, Step

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
    formats: Mapping[str, str]  # role -> bf16, f16, f32, q8, mxfp4; held as `Formats`, since layers may differ
    features: Mapping[str, frozenset[str]]  # operation -> features
    dtype: str  # residual stream and dense activations: f32 or bf16
    activation: str  # quantisation point in front of quantised matrices
    kv_dtype: str  # f32, bf16, fp8
    page_size: int
    max_context: int = 131072  # positions go up to here: tables over them end there
    tile: str = "auto"
    activations: Mapping[str, str] = field(default_factory=dict)  # regime -> activation, where it is another one
    host_layers: int = 0  # layers, from the first on, whose experts are in host memory although a GPU runs the step
    host_activation: str = "int8"  # in front of those experts
    wide: frozenset[str] = frozenset()  # norms, biases, sinks and the router that hold more bits than bf16 has

    def at(self, regime: str) -> Spec:
        """What holds in one regime: the spec that a phase is asked about, and bound with, there."""
        if not self.activations:
            return self
        return replace(self, activation=self.activations.get(regime, self.activation), activations={})

    def views(self, covers: tuple[str, ...]) -> tuple[Spec, ...]:
        """The specs that a phase with these operations is asked about: this one if it runs all layers in one piece,
        else one for each set of formats that a layer has."""
        if not self.matrices.by_layer or covers in (OPERATIONS, ALL_LAYERS):
            return (self,)
        different: list[Formats] = []
        for layer in range(self.layers):
            formats = self.matrices.in_layer(layer)
            if formats not in different:
                different.append(formats)
        return tuple(replace(self, formats=formats) for formats in different)

    def in_layer(self, covers: tuple[str, ...], layer: int | None) -> Spec:
        """The spec that a phase with these operations is bound with in one layer, or outside the layers."""
        if not self.matrices.by_layer or covers in (OPERATIONS, ALL_LAYERS):
            return self
        return replace(self, formats=self.matrices.in_layer(layer or 0))

    @property
    def matrices(self) -> Formats:
        """`formats` by role and layer."""
        assert isinstance(self.formats, Formats)
        return self.formats

    def __post_init__(self) -> None:
        object.__setattr__(self, "formats", Formats(self.formats))

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
    state: dict[str, Any] = field(default_factory=dict)  # what the layers of one model share, by name


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
    row_invariant: bool = False  # in a step with a fixed regime a row's bits depend on no other row and on no count
    mixes: bool = False  # runs all layers in one piece, and takes other formats in other layers
    host_experts: bool = False  # multiplies experts of which some are in host memory; others refuse those
    row_octaves: int | None = None  # between the MXFP4 scales of a row that it holds; None: any
    taps: bool = False  # runs all layers in one piece, and leaves what a step's `taps` ask for
    choices: bool = False  # the same of a step's `choices`
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

    def thread_counts(self) -> list[int]:
        """The number of threads of each pool that this process has started for it."""
        return []

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
