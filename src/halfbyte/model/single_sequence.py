"""One sequence on its own, over pages in a straight line: the oracle of the engine's tests, and a model's simplest use.

No batching, no prefix cache, no sampling beyond what a caller does with the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from halfbyte.errors import ContextError
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.sampling import greedy
from halfbyte.plan.step import Step


class SingleSequence:
    """Feeds tokens of one sequence through a model, chunk by chunk."""

    def __init__(self, model: GptOss, max_tokens: int) -> None:
        self.model = model
        page = model.spec.page_size
        blocks = -(-max_tokens // page)
        self.capacity = blocks * page
        self.length = 0
        model.allocate_kv(1 + 2 * blocks)
        pages = torch.arange(1, 1 + 2 * blocks, dtype=torch.int32, device=model.device).view(2, 1, blocks)
        self.tables = {"sliding": pages[0], "full": pages[1]}

    def feed(self, tokens: Sequence[int], *, all_logits: bool = False) -> Tensor:
        """Append tokens; logits of the last one, or of every one."""
        return self.model.forward(self.step(tokens, all_logits=all_logits))

    def step(self, tokens: Sequence[int], *, all_logits: bool = False) -> Step:
        """The step that appends tokens, to be run by the caller, in the order in which steps were made."""
        n, at, device = len(tokens), self.length, self.model.device
        if at + n > self.capacity:
            raise ContextError(f"{at + n} tokens do not fit in the {self.capacity} this cache was made for.")

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.length += n
        return Step(
            tokens=ints(tokens),
            positions=torch.arange(at, at + n, dtype=torch.int32, device=device),
            query_start=ints([0, n]),
            kv_lens=ints([at + n]),
            row_sequence=torch.zeros(n, dtype=torch.int32, device=device),
            block_tables=self.tables,
            logit_rows=ints(range(n) if all_logits else [n - 1]),
            max_kv_len=at + n,
        )


def generate(
    model: GptOss,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    chunk: int = 512,
    pick: Callable[[Tensor], int] | None = None,
    stop: Sequence[int] | None = None,
) -> Iterator[int]:
    """Tokens after `prompt`, greedily unless `pick` chooses; ends after a stop token (default: the model's)."""
    if not prompt:
        raise ContextError("the prompt is empty; give at least one token.")
    stops = set(model.config.eos_tokens if stop is None else stop)
    sequence = SingleSequence(model, len(prompt) + max_tokens)
    logits = torch.empty(0)
    for i in range(0, len(prompt), chunk):
        logits = sequence.feed(prompt[i : i + chunk])
    for i in range(max_tokens):
        token = int(greedy(logits[0])) if pick is None else pick(logits[0])
        yield token
        if token in stops or i + 1 == max_tokens:
            return
        logits = sequence.feed([token])
