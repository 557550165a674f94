"""Step: one ragged batch of rows, as every phase sees it.

Who sets what: the engine's batch builder fills every field; phases only read. On a GPU the tensors are fixed buffers
that a captured graph reads again and again; `rows` and `sequences` are then the padded counts, padding rows belong to
sequence 0's scratch page and their results are never read.

The KV pool is one tensor [pages, layers_per_page, 2, kv_heads, page_size, head_dim] (K, then V). Page 0 is scratch:
never allocated, written by padding rows, and the entry of every block that a sliding table has given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from halfbyte.architectures import REGIMES as REGIMES
from halfbyte.architectures import Regime as Regime
from halfbyte.architectures import RegimeLimits as RegimeLimits


def kernels_of(regime: Regime) -> Regime:
    """The regime whose kernels are used: long prompts take prefill's, with other activations if the gates say so."""
    return "prefill" if regime == "long" else regime


# What kernels choose their tiles by where the regime of a step is fixed, so that no tile depends on the rows there are.
TILE_ROWS: dict[Regime, int] = {"decode": 1, "batch": 64, "prefill": 2048, "long": 2048}


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
    regime: Regime | None = None  # None: by the number of rows
    # Further results that a phase may or must leave; not used on a GPU.
    best_only: bool = False  # only the highest logit is needed: `best` may replace the logits
    choices: bool = False  # the experts of every layer are read
    taps: tuple[int, ...] = ()  # layers whose input, the residual stream, is read (their number: the last one's output)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def sequences(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def tile_rows(self) -> int | None:
        """The rows that tiles are chosen by where the regime is fixed; None: those there are."""
        return None if self.regime is None else TILE_ROWS[self.regime]
