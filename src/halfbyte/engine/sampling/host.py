"""From logits to tokens on the host: per request, independent of every other row and of when a step runs.

A request gives the same tokens alone, in a batch, after a preemption, and under speculation: a drafted token is
accepted exactly if it is the one that would have been sampled anyway. Only a proposer that hands over its own
distribution goes through rejection sampling, which keeps the distribution but not the individual tokens.

What each parameter means is in `halfbyte.ops.sampling`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.engine.batch import Batch
from halfbyte.engine.request import SamplingParams
from halfbyte.engine.runner import StepResult
from halfbyte.engine.sampling.logprobs import logprob_of
from halfbyte.engine.sampling.row import ACCEPT, RowSampler
from halfbyte.ops.sampling import distribution, penalise
from halfbyte.plan.broken import broken_place

Row = NDArray[np.float32]
NO_TOKEN = "bias, minimum length and grammar together allow no token"
NOT_NUMBERS = "the logits of this row are not numbers"
CANDIDATES = 512  # likeliest tokens that are sorted before the whole vocabulary is
SPREAD = 10.0  # below the best logit: what lies further down has less than 1/20,000 of the best one's probability


def not_numbers(bits: int) -> str:
    """Why a row has no token; `bits` are those of a logit of it, which may say where it went wrong."""
    layer = broken_place(bits)
    return NOT_NUMBERS + (f" since {layer}" if layer else "")


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


def sample_on_host(logits: Tensor, batch: Batch) -> StepResult:
    """Tokens for every row of `logits` float32 [L, vocab]. A row that cannot be sampled becomes an error of its own."""
    if not batch.samplers:
        return StepResult([])
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    # numpy, not torch: one row at a time, torch's threads cost more than they bring. NaN counts as the highest.
    best, lowest = rows.argmax(-1), rows.min(-1)
    result = StepResult(best.tolist())
    for i, sampler in enumerate(batch.samplers):
        if not (math.isfinite(rows[i, best[i]]) and math.isfinite(lowest[i])):
            result.errors[i] = not_numbers(int(rows[i].view(np.int32)[best[i]]))
        elif not sampler.simple or i in batch.masks:
            try:
                result.tokens[i] = _sample_row(rows[i], sampler, i, batch, result)
            except (ValueError, RuntimeError, IndexError) as e:
                result.errors[i] = str(e)
    return result


def take_best(best: Tensor, logit: Tensor) -> StepResult:
    """Tokens of rows that need only the highest logit; `best` is -1 where a logit is NaN or Inf."""
    result = StepResult(best.tolist())
    for i, (token, value) in enumerate(zip(result.tokens, logit.tolist())):
        if token < 0 or not math.isfinite(value):
            result.tokens[i], result.errors[i] = 0, not_numbers(int(logit[i].view(torch.int32)))
    return result


def sample_row_on_host(logits: Tensor, batch: Batch, row: int) -> StepResult:
    """This row alone: `logits` float32 [L, vocab] of the whole batch."""
    return sample_on_host(
        logits[row : row + 1],
        replace(
            batch, samplers=[batch.samplers[row]], sample_positions=[batch.sample_positions[row]],
            histories={0: batch.histories[row]} if row in batch.histories else {},
            targets={0: batch.targets[row]} if row in batch.targets else {},
            masks={0: batch.masks[row]} if row in batch.masks else {},
            proposals={0: batch.proposals[row]} if row in batch.proposals else {},
        ),
    )  # fmt: skip


def _sample_row(raw: Row, sampler: RowSampler, row: int, batch: Batch, result: StepResult) -> int:
    position, p = batch.sample_positions[row], sampler.params
    logits = adjust(raw, sampler, position, batch.histories.get(row), batch.masks.get(row))
    token = int(logits.argmax())
    if logits[token] == -math.inf:
        raise ValueError(NO_TOKEN)
    if not sampler.greedy:
        proposal = batch.proposals.get(row)
        if proposal is not None:
            token = _accept_or_resample(logits, proposal, sampler, position)
        else:
            token = sample_token(logits, p, sampler.uniform(position))
    token = batch.targets.get(row, token)
    if p.logprobs is not None:
        result.logprobs[row] = logprob_of(raw, token, p.logprobs)
    return token


def sample_token(logits: Row, p: SamplingParams, uniform: float) -> int:
    """Like `distribution` and `sample` of halfbyte.ops.sampling, but avoids sorting the entire vocabulary.

    Sorts only the likeliest candidates; if the parameters reach past them, all tokens.
    """
    vocab = logits.shape[0]
    limited = 0 < p.top_k < vocab
    x = logits.astype(np.float64)
    x /= p.temperature
    if p.top_n_sigma > 0.0:
        x[x < x.max() - p.top_n_sigma * x[x > -math.inf].std()] = -math.inf
    if limited:
        ids = _likeliest(x, max(64, p.top_k))
    else:
        ids = np.nonzero(x >= x.max() - SPREAD)[0]  # one comparison, where models are as sure as they mostly are
        if ids.shape[0] > CANDIDATES:
            ids = _likeliest(x, CANDIDATES)
    first = _sample_among(x, ids, p, limited, uniform)
    token = _sample_among(x, np.arange(vocab), p, limited, uniform) if first is None else first
    assert token is not None
    return token


def _likeliest(x: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the highest `count`, and of what equals the last of them."""
    vocab = x.shape[0]
    if count >= vocab:
        return np.arange(vocab)
    least: np.float64 = np.partition(x, vocab - count)[vocab - count]
    return np.nonzero(x >= least)[0]


def _sample_among(
    x: NDArray[np.float64], ids: NDArray[np.int64], p: SamplingParams, limited: bool, uniform: float
) -> int | None:
    """A sample from these tokens, which are the likeliest; None if the others are needed as well."""
    all_tokens = ids.shape[0] == x.shape[0]
    chosen = x[ids]
    order = np.argsort(-chosen, kind="stable")
    ids, chosen = ids[order], chosen[order]
    if limited:
        ids, chosen = ids[: p.top_k], chosen[: p.top_k]
    weights = np.exp(chosen - chosen[0])
    weights /= weights.sum() if limited or all_tokens else np.exp(x - chosen[0]).sum()
    if p.top_p >= 1.0 and p.min_p <= 0.0 and not limited and not all_tokens:  # the usual request: nothing is cut off
        at = int(weights.cumsum().searchsorted(uniform, side="right"))
        return int(ids[at]) if at < ids.shape[0] else None
    keep = weights > 0
    if p.top_p < 1.0:
        keep &= np.cumsum(weights) - weights < p.top_p
    if p.min_p > 0.0:
        keep &= weights >= p.min_p * weights[0]
    keep[0] = True
    probabilities, ids = weights[keep], ids[keep]
    closed = (
        limited or all_tokens or probabilities.shape[0] < keep.shape[0]
    )  # nothing beyond the candidates may be sampled
    if not closed:
        return None
    probabilities = probabilities / probabilities.sum()
    at = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
    return int(ids[min(at, ids.shape[0] - 1)])


def _accept_or_resample(
    logits: Row, proposal: tuple[int, NDArray[np.float64]], sampler: RowSampler, position: int
) -> int:
    """Rejection sampling (Leviathan et al., Chen et al.): keep x ~ q with min(1, p/q), else draw from max(p - q, 0)."""
    draft, q_row = proposal
    s = sampler.params
    p, ids = distribution(torch.from_numpy(logits), s)
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
