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
from halfbyte.ops.sampling import distribution, penalise

Row = NDArray[np.float32]
DRAW, ACCEPT, PROPOSE = 0, 1, 2  # streams of randomness at one position


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


class RowSampler:
    """How one choice of one request picks its tokens. Made once; the sampler reads it at every step."""

    __slots__ = (
        "bias", "forced_until", "greedy", "key", "needs_host", "params", "penalised", "prompt", "simple", "stops",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, index: int, prompt: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt = prompt
        self.key = f"{seed & 0xFFFFFFFFFFFFFFFF}/{index}/".encode()
        self.greedy = params.temperature == 0.0
        self.penalised = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        self.bias = tuple(params.logit_bias.items())
        self.forced_until = prompt + params.min_tokens if params.min_tokens and stop_ids else 0
        self.stops = sorted(stop_ids)
        self.needs_host = bool(self.penalised or self.bias or self.forced_until)
        # Nothing but the highest logit is asked for.
        self.simple = self.greedy and not self.needs_host and params.logprobs is None

    def uniform(self, position: int, stream: int = DRAW) -> float:
        """In [0, 1), fixed by seed, choice, position and stream."""
        digest = blake2b(self.key + position.to_bytes(8, "little") + bytes((stream,)), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def adjust(
    logits: Row, sampler: RowSampler, position: int, history: list[int] | None, mask: NDArray[np.int32] | None
) -> Row:
    """One row [vocab] -> penalties, bias, minimum length and grammar applied."""
    p = sampler.params
    if sampler.penalised:
        assert history is not None
        seen = torch.zeros(logits.shape[0], dtype=torch.bool)
        seen[torch.tensor(history)] = True
        generated = torch.tensor(history[sampler.prompt :], dtype=torch.int64)
        counts = torch.bincount(generated, minlength=logits.shape[0])
        row = torch.from_numpy(logits)
        logits = penalise(row, counts, seen, p.repetition_penalty, p.presence_penalty, p.frequency_penalty).numpy()
    if sampler.bias or position < sampler.forced_until or mask is not None:
        logits = logits.copy()
        for token, bias in sampler.bias:
            logits[token] += bias
        if position < sampler.forced_until:
            logits[sampler.stops] = -math.inf
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[0]].astype(bool)
            logits[: allowed.shape[0]][~allowed] = -math.inf
            logits[allowed.shape[0] :] = -math.inf  # the output layer may be padded past the vocabulary
    return logits


def sample(logits: Tensor, batch: Batch) -> StepResult:
    """Tokens for every row of `logits` float32 [L, vocab]. A row that cannot be sampled becomes an error of its own."""
    samplers = batch.samplers
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    # numpy, not torch: one row at a time, torch's threads cost more than they bring. NaN counts as the highest.
    best = rows.argmax(-1)
    result = StepResult(best.tolist())
    for i, sampler in enumerate(samplers):
        if not math.isfinite(rows[i, best[i]]):
            result.errors[i] = NOT_NUMBERS
        elif not sampler.simple or i in batch.masks:
            try:
                result.tokens[i] = _pick(rows[i], sampler, i, batch, result)
            except (ValueError, RuntimeError, IndexError) as e:
                result.errors[i] = str(e)
    return result


NOT_NUMBERS = "the logits of this row are not numbers"


def _pick(raw: Row, sampler: RowSampler, row: int, batch: Batch, result: StepResult) -> int:
    position, p = batch.sample_positions[row], sampler.params
    logits = adjust(raw, sampler, position, batch.histories.get(row), batch.masks.get(row))
    token = int(logits.argmax())
    if logits[token] == -math.inf:
        raise ValueError("bias, minimum length and grammar together allow no token")
    if not sampler.greedy:
        proposal = batch.proposals.get(row)
        if proposal is not None:
            token = _accept_or_redraw(logits, proposal, sampler, position)
        else:
            token = draw_token(logits, p, sampler.uniform(position))
    if p.logprobs is not None:
        result.logprobs[row] = logprob_of(raw, token, p.logprobs)
    return token


def draw_token(logits: Row, p: SamplingParams, uniform: float) -> int:
    """As `distribution` and `draw` of halfbyte.ops.sampling, without sorting a whole vocabulary if that can be avoided.

    Only the likeliest candidates are sorted; if what was asked for reaches past them, all are.
    """
    vocab = logits.shape[0]
    limited = 0 < p.top_k < vocab
    x = logits.astype(np.float64) / p.temperature
    first = _draw_among(x, max(64, p.top_k) if limited else _CANDIDATES, p, limited, uniform)
    token = _draw_among(x, vocab, p, limited, uniform) if first is None else first
    assert token is not None
    return token


def _draw_among(x: NDArray[np.float64], few: int, p: SamplingParams, limited: bool, uniform: float) -> int | None:
    """A draw that needs no more than the `few` likeliest; None if it does."""
    vocab = x.shape[0]
    whole = few >= vocab
    ids = np.arange(vocab) if whole else np.nonzero(x >= np.partition(x, vocab - few)[vocab - few])[0]  # ties included
    ids = ids[np.argsort(-x[ids], kind="stable")]
    if limited:
        ids = ids[: p.top_k]
    weights = np.exp(x[ids] - x[ids[0]])
    weights /= weights.sum() if limited or whole else np.exp(x - x[ids[0]]).sum()
    keep = weights > 0
    if p.top_p < 1.0:
        keep &= np.cumsum(weights) - weights < p.top_p
    if p.min_p > 0.0:
        keep &= weights >= p.min_p * weights[0]
    keep[0] = True
    kept, ids = weights[keep], ids[keep]
    closed = limited or whole or kept.shape[0] < keep.shape[0]  # nothing beyond the candidates may be drawn
    if closed:
        kept = kept / kept.sum()
    elif p.top_p < 1.0 or p.min_p > 0.0:
        return None
    at = int(np.searchsorted(np.cumsum(kept), uniform, side="right"))
    if at < kept.shape[0]:
        return int(ids[at])
    return int(ids[-1]) if closed else None


_CANDIDATES = 512


def _accept_or_redraw(
    logits: Row, proposal: tuple[int, NDArray[np.float64]], sampler: RowSampler, position: int
) -> int:
    """Rejection sampling (Leviathan et al., Chen et al.): keep x ~ q with min(1, p/q), else draw from max(p - q, 0)."""
    draft, q_row = proposal
    s = sampler.params
    p, ids = distribution(torch.from_numpy(logits), s.temperature, s.top_k, s.top_p, s.min_p)
    target = np.zeros(logits.shape[0])
    target[ids.numpy()] = p.numpy()
    q = np.zeros(logits.shape[0])
    q[: q_row.shape[0]] = q_row
    if sampler.uniform(position, ACCEPT) * q[draft] < target[draft]:
        return draft
    rest = np.maximum(target - q, 0.0)
    rest[draft] = 0.0
    total = rest.sum()
    if total <= 0.0:  # p == q up to rounding: the draft was as good as any
        return draft
    keep = np.nonzero(rest)[0]
    at = int(np.searchsorted(np.cumsum(rest[keep] / total), sampler.uniform(position), side="right"))
    return int(keep[min(at, keep.shape[0] - 1)])


def logprob_of(logits: Row, token: int, top: int) -> Logprob:
    x = logits.astype(np.float64)
    base = float(x.max())
    base += math.log(float(np.exp(x - base).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top:
        cut = np.partition(x, max(0, x.shape[0] - top))[max(0, x.shape[0] - top)]
        ids = np.nonzero(x >= cut)[0]
        ids = ids[np.argsort(-x[ids], kind="stable")][:top]
        best = tuple((int(i), float(x[i]) - base) for i in ids)
    return Logprob(token, float(x[token]) - base, best)
