"""The shape of a gpt-oss model, whatever file it came from, and the shapes that have names.

Refuses numbers that the network in `gpt_oss.py` cannot mean. Knows no file: `config_json.py` and `gguf_header.py` do.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from halfbyte.errors import CheckpointError

PAGE_SIZE = 64  # tokens of one page of the KV cache, by default
LayerKind = Literal["sliding", "full"]

# Far beyond any gpt-oss, and small enough that what is made per layer or per position stays small: a file that claims
# more is refused before anything is allocated for it.
MOST_LAYERS = 1024
MOST_POSITIONS = 1 << 22


@dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling. `factor` 1 means plain rope."""

    factor: float = 32.0
    original_context: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False
    attention_factor: float | None = None  # what cos and sin are multiplied with; None: as the paper says

    @property
    def is_plain(self) -> bool:
        return self.factor == 1.0 and self.attention_factor in (None, 1.0)

    def problems(self) -> list[str]:
        problems = []
        numbers = {"factor": self.factor, "beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        if self.attention_factor is not None:
            numbers["attention_factor"] = self.attention_factor
        for name, value in numbers.items():
            if not (math.isfinite(value) and value > 0):
                problems.append(f"the rope's {name} is {value}")
        if not 1 <= self.original_context <= MOST_POSITIONS:
            problems.append(f"the rope's original context is {self.original_context}")
        return problems


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int = 128
    max_context: int = 131072
    rope_theta: float = 150000.0
    yarn: Yarn = Yarn()
    norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    layer_kinds: tuple[LayerKind, ...] = ()
    eos_tokens: tuple[int, ...] = (200002,)
    pad_token: int = 199999
    name: str = "gpt-oss"

    def __post_init__(self) -> None:
        problems = self._bad_numbers()
        if not problems:
            if not self.layer_kinds:
                kinds = tuple("sliding" if i % 2 == 0 else "full" for i in range(self.layers))
                object.__setattr__(self, "layer_kinds", kinds)
            problems = self._bad_relations()
        if problems:
            raise CheckpointError(f"not a usable gpt-oss configuration: {'; '.join(problems)}.")

    def _bad_numbers(self) -> list[str]:
        sizes = ("layers", "hidden", "intermediate", "experts", "top_k", "heads", "kv_heads", "head_dim", "vocab")
        problems = [f"{name} is {n}" for name in (*sizes, "window", "max_context") if (n := getattr(self, name)) < 1]
        for name, most in (("layers", MOST_LAYERS), ("max_context", MOST_POSITIONS)):
            if getattr(self, name) > most:
                problems.append(f"{name} is {getattr(self, name)}, more than {most}")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            problems.append(f"rope_theta is {self.rope_theta}")
        for name in ("norm_eps", "swiglu_limit"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                problems.append(f"{name} is {getattr(self, name)}")
        if not math.isfinite(self.swiglu_alpha):
            problems.append(f"swiglu_alpha is {self.swiglu_alpha}")
        return problems + self.yarn.problems()

    def _bad_relations(self) -> list[str]:
        problems = []
        if len(self.layer_kinds) != self.layers:
            problems.append(f"layer_types has {len(self.layer_kinds)} entries for {self.layers} layers")
        if self.heads % self.kv_heads:
            problems.append(f"{self.heads} query heads do not divide over {self.kv_heads} kv heads")
        if self.top_k > self.experts:
            problems.append(f"top-{self.top_k} of {self.experts} experts")
        if self.head_dim % 2:
            problems.append(f"head_dim {self.head_dim} is odd")
        return problems

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        return self.q_dim + 2 * self.kv_dim

    def kind_index(self, layer: int) -> int:
        """Position of `layer` among the layers of its own kind: its place inside a KV page."""
        return self.layer_kinds[:layer].count(self.layer_kinds[layer])

    def kind_count(self, kind: LayerKind) -> int:
        return self.layer_kinds.count(kind)

    @property
    def layers_per_page(self) -> int:
        """A KV page holds the layers of one kind, whichever it is."""
        return max(self.kind_count("sliding"), self.kind_count("full"))

    def with_(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    def summary(self) -> dict[str, Any]:
        return asdict(self)


def default_ends(vocab: int) -> tuple[int, ...]:
    """The end tokens of a file that names none: gpt-oss's, where the vocabulary has them."""
    return tuple(id for id in ModelConfig.eos_tokens if id < vocab)


def _gpt_oss(name: str, layers: int, experts: int) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=2880, intermediate=2880, experts=experts, top_k=4,
        heads=64, kv_heads=8, head_dim=64, vocab=201088, name=name,
    )  # fmt: skip


# The true shapes, and a small one whose every dimension differs from every other.
NAMED: dict[str, ModelConfig] = {
    "120b": _gpt_oss("gpt-oss-120b", 36, 128),
    "20b": _gpt_oss("gpt-oss-20b", 24, 32),
    "small": ModelConfig(
        layers=4, hidden=256, intermediate=192, experts=8, top_k=4, heads=8, kv_heads=2, head_dim=32,
        vocab=1024, max_context=8192, yarn=Yarn(factor=8.0, original_context=256),
        eos_tokens=(1,), pad_token=0, name="small",
    ),
}  # fmt: skip
