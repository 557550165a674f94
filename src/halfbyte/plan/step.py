"""Step: one ragged batch of rows, as every phase sees it.

Who sets what: the engine's batch builder fills every field; phases only read. On a GPU the tensors are fixed buffers
that a captured graph reads again and again; `rows` and `sequences` are then the padded counts, padding rows belong to
sequence 0's scratch page and nobody reads what they produce.

The KV pool is one tensor [pages, layers_per_page, 2, kv_heads, page_size, head_dim] (K, then V). Page 0 is scratch:
never allocated, written by padding rows, and the entry of every block that a sliding table has given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Regime = Literal["decode", "batch", "prefill", "long"]
REGIMES: tuple[Regime, ...] = ("decode", "batch", "prefill", "long")


@dataclass(frozen=True)
class RegimeLimits:
    """Where one regime's kernels become faster than another's: rows of a step, a property of the machine."""

    decode: int  # the most rows of a decode step
    batch: int  # the most rows of a batch
    long: int  # the fewest rows of a long prompt
    source: str  # where the numbers come from

    def regime(self, rows: int) -> Regime:
        if rows > self.batch:
            return "prefill" if rows < self.long else "long"
        return "decode" if rows <= self.decode else "batch"

    def range(self, regime: Regime) -> str:
        """In words, for people."""
        return {
            "decode": f"1–{self.decode} rows",
            "batch": f"{self.decode + 1}–{self.batch} rows",
            "prefill": f"{self.batch + 1}–{self.long - 1} rows",
            "long": f"{self.long} rows and more",
        }[regime]


def kernels_of(regime: Regime) -> Regime:
    """Whose kernels a regime takes: long prompts are prefill, with activations of their own if the gates say so."""
    return "prefill" if regime == "long" else regime


@dataclass
class Step:
    tokens: Tensor  # int32 [R]
    positions: Tensor  # int32 [R]
    query_start: Tensor  # int32 [S + 1]: rows of sequence s are query_start[s] .. query_start[s + 1]
    kv_lens: Tensor  # int32 [S], this step's tokens included
    row_sequence: Tensor  # int32 [R]: the sequence of each row
    block_tables: Mapping[str, Tensor]  # kind -> int32 [S, blocks]
    logit_rows: Tensor  # int32 [L]: rows whose logits are wanted
    max_kv_len: int  # host-side bound on kv_lens, for grid sizes
    singles: int = 0  # sequences in front of all others that have one row each, as far as the host says so
    # What a phase may or must leave besides: on a GPU nobody asks.
    best_only: bool = False  # nobody reads more of the logits than the highest: `best` may stand instead of them
    choices: bool = False  # the experts of every layer are read
    taps: tuple[int, ...] = ()  # layers whose input, the residual stream, is read (their number: the last one's output)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> int:
        return self.kv_lens.shape[0]
