"""From logits to tokens: per request, independent of every other row and of when a step runs.

The randomness of a token is a function of (seed, choice, position) and nothing else, so a request gives the same
tokens alone, in a batch, after a preemption, and under speculation: a drafted token is accepted exactly if it is the
one that would have been drawn anyway. Only a proposer that hands over its own distribution goes through rejection
sampling, which keeps the distribution but not the individual tokens.

Logprobs are of the model's own distribution, before penalties, bias, grammar and temperature. What each parameter
means is in `halfbyte.ops.sampling`.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch, StepResult
from halfbyte.engine.request import Logprob, SamplingParams
from halfbyte.errors import RequestError
from halfbyte.ops.sampling import distribution, draw, greedy, penalise

DRAW, ACCEPT = 0, 1  # streams of randomness at one position


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuses what can never be served, before the request is queued."""
    problems = []
    if not 0.0 <= params.temperature <= 100.0:
        problems.append(f"temperature is {params.temperature}, not between 0 and 100")
    if params.top_k < 0:
        problems.append(f"top_k is {params.top_k}; 0 means no limit")
    if not 0.0 < params.top_p <= 1.0:
        problems.append(f"top_p is {params.top_p}, not in (0, 1]")
    if not 0.0 <= params.min_p <= 1.0:
        problems.append(f"min_p is {params.min_p}, not in [0, 1]")
    if not 0.0 < params.repetition_penalty <= 100.0:
        problems.append(f"repetition_penalty is {params.repetition_penalty}, not in (0, 100]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -100.0 <= getattr(params, name) <= 100.0:
            problems.append(f"{name} is {getattr(params, name)}, not between -100 and 100")
    if params.max_tokens is not None and params.max_tokens < 1:
        problems.append(f"max_tokens is {params.max_tokens}; ask for at least 1")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        problems.append(f"min_tokens is {params.min_tokens}, not between 0 and max_tokens")
    if params.n < 1:
        problems.append(f"n is {params.n}; ask for at least 1")
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab:
        problems.append(f"logprobs is {params.logprobs}, not between 0 and the vocabulary's {vocab}")
    for what, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [t for t in ids if not 0 <= t < vocab]
        if outside:
            problems.append(f"{what} names token {outside[0]}, but the vocabulary has {vocab}")
    if any(not math.isfinite(b) and b != -math.inf for b in params.logit_bias.values()):
        problems.append("a logit_bias is not a number")
    if "" in params.stop:
        problems.append("a stop string is empty")
    if problems:
        raise RequestError(f"this request cannot be served: {'; '.join(problems)}.")


class Picker:
    """How one choice of one request picks its tokens. Made once; the sampler reads it at every step."""

    __slots__ = ("bias", "forced_until", "greedy", "key", "params", "penalised", "prompt", "simple", "stops")

    def __init__(self, params: SamplingParams, index: int, prompt: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt = prompt
        self.key = f"{seed & 0xFFFFFFFFFFFFFFFF}/{index}/".encode()
        self.greedy = params.temperature == 0.0
        self.penalised = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        self.bias = tuple(params.logit_bias.items())
        self.forced_until = prompt + params.min_tokens if params.min_tokens and stop_ids else 0
        self.stops = sorted(stop_ids)
        # Nothing but the highest logit is asked for.
        self.simple = (
            self.greedy and not self.penalised and not self.bias and not self.forced_until and params.logprobs is None
        )

    def uniform(self, place: int, stream: int = DRAW) -> float:
        """In [0, 1), fixed by seed, choice, position and stream."""
        digest = blake2b(self.key + place.to_bytes(8, "little") + bytes((stream,)), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def adjust(logits: Tensor, picker: Picker, place: int, history: list[int] | None, mask: Tensor | None) -> Tensor:
    """One row [vocab] -> penalties, bias, minimum length and grammar applied."""
    p = picker.params
    if picker.penalised:
        assert history is not None
        seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        seen[torch.tensor(history, device=logits.device)] = True
        counts = torch.bincount(
            torch.tensor(history[picker.prompt :], dtype=torch.int64, device=logits.device), minlength=logits.shape[-1]
        )
        logits = penalise(logits, counts, seen, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    if picker.bias or place < picker.forced_until:
        logits = logits.clone()
        for token, bias in picker.bias:
            logits[token] += bias
        if place < picker.forced_until:
            logits[picker.stops] = -math.inf
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return logits


def unpack_mask(bits: NDArray[np.int32], vocab: int, device: torch.device) -> Tensor:
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab].astype(bool)
    if allowed.shape[0] < vocab:  # the output layer may be padded past the vocabulary
        allowed = np.concatenate([allowed, np.zeros(vocab - allowed.shape[0], bool)])
    return torch.from_numpy(allowed).to(device)


def sample(logits: Tensor, batch: Batch) -> StepResult:
    """Tokens for every row of `logits` float32 [L, vocab]. A row that cannot be sampled becomes an error of its own."""
    pickers = batch.pickers
    if not batch.masks and all(p.simple for p in pickers):
        tokens = greedy(logits).tolist()
        errors = {}
        if not bool(torch.isfinite(logits.sum())):
            bad = (~torch.isfinite(logits).all(-1)).nonzero().flatten().tolist()
            errors = dict.fromkeys(bad, _NOT_NUMBERS)
        return StepResult(tokens, errors=errors)
    result = StepResult([])
    for i, picker in enumerate(pickers):
        try:
            token = _pick(logits[i], picker, i, batch, result)
        except (ValueError, RuntimeError, IndexError) as e:
            result.errors[i] = str(e)
            token = 0
        result.tokens.append(token)
    return result


_NOT_NUMBERS = "the logits of this row are not numbers"


def _pick(raw: Tensor, picker: Picker, row: int, batch: Batch, result: StepResult) -> int:
    if not bool(torch.isfinite(raw).all()):
        raise ValueError(_NOT_NUMBERS)
    bits = batch.masks.get(row)
    mask = None if bits is None else unpack_mask(bits, raw.shape[-1], raw.device)
    place = batch.places[row]
    logits = adjust(raw, picker, place, batch.histories.get(row), mask)
    if float(logits.max()) == -math.inf:
        raise ValueError("bias, minimum length and grammar together allow no token")
    p = picker.params
    proposal = batch.proposals.get(row)
    if picker.greedy:
        token = int(greedy(logits))
    else:
        probabilities, ids = distribution(logits, p.temperature, p.top_k, p.top_p, p.min_p)
        if proposal is None:
            token = draw(probabilities, ids, picker.uniform(place))
        else:
            token = _accept_or_redraw(probabilities, ids, raw.shape[-1], proposal, picker, place)
    if p.logprobs is not None:
        result.logprobs[row] = logprob_of(raw, token, p.logprobs)
    return token


def _accept_or_redraw(
    p: Tensor, ids: Tensor, vocab: int, proposal: tuple[int, NDArray[np.float64]], picker: Picker, place: int
) -> int:
    """Rejection sampling (Leviathan et al., Chen et al.): keep x ~ q with min(1, p/q), else draw from max(p - q, 0)."""
    draft, q_row = proposal
    target = torch.zeros(vocab, dtype=torch.float64)
    target[ids.cpu()] = p.cpu()
    q = torch.from_numpy(q_row)
    if q.shape[0] < vocab:
        q = torch.nn.functional.pad(q, (0, vocab - q.shape[0]))
    if picker.uniform(place, ACCEPT) * float(q[draft]) < float(target[draft]):
        return draft
    rest = (target - q).clamp_min(0.0)
    rest[draft] = 0.0
    total = rest.sum()
    if float(total) <= 0.0:  # p == q up to rounding: the draft was as good as any
        return draft
    keep = rest.nonzero().flatten()
    return draw(rest[keep] / total, keep, picker.uniform(place))


def logprob_of(logits: Tensor, token: int, top: int) -> Logprob:
    row = torch.log_softmax(logits.double(), -1)
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = row.sort(descending=True, stable=True)
        best = tuple(zip(ids[:top].tolist(), values[:top].tolist()))
    return Logprob(token, float(row[token]), best)
