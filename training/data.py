"""Conversations to packed rows: groups of problems become documents with one trunk and branches that leave it.

A shard is a pure function of (seed, name, index), so a run can be repeated and worker processes need no coordination.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import second_edition
import torch
from network import Packed

from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import MIXTURE, group
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

Array = npt.NDArray[np.int16]
AHEAD = 3  # shards that a worker may be ahead of training
PADDING = 30_000  # the document of unused tokens: after every other
FIELDS = ("token", "target", "weight", "position", "document", "branch")


@dataclass(frozen=True)
class Recipe:
    """What a shard holds."""

    name: str
    seed: int
    tokenizer: Path
    length: int = 8192
    rows: int = 60
    mixture: Mapping[str, float] = field(default_factory=lambda: dict(MIXTURE))
    short: Mapping[str, float] | None = None
    sentences: tuple[int, int] = (20, 120)
    who: float = 0.3
    conversations: float = 0.0  # share of documents that are conversations of the second edition


class CachedVocabulary:
    """A tokenizer that remembers, because conversations of a group share most of their pieces.

    A long piece is cut at its last blank line: the vocabulary never joins tokens across the end of a line break, so
    the tokens are the same.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special = tokenizer.special
        self.token_bytes = tokenizer.token_bytes
        self._encode = functools.lru_cache(maxsize=20_000)(lambda text: tuple(tokenizer.encode(text)))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        assert not allow_special
        cut = text.rfind("\n\n") + 2
        if len(text) > 400 and 2 < cut < len(text) and text[cut].isalpha():
            return [*self._encode(text[:cut]), *self._encode(text[cut:])]
        return list(self._encode(text))


@dataclass
class Document:
    trunk: list[int]
    branches: list[tuple[int, list[int], int]]  # where it leaves the trunk, its tokens, how many of these are prompt

    def __len__(self) -> int:
        return len(self.trunk) + sum(len(tokens) for _, tokens, _ in self.branches)


def document(vocabulary: CachedVocabulary, problems: list[Problem], limit: int) -> Document:
    """The longest prompt is the trunk; every problem leaves it where it differs. No branch passes `limit` tokens.

    So each turn of a conversation, and several questions about one text, compute what they share once.
    """
    whole = []
    for p in problems:
        ids, _ = render_training_example(vocabulary, p.worked())
        whole.append((ids, len(render_prompt(vocabulary, p.prompt()))))
    longest, prompt = max(whole, key=lambda example: example[1])
    trunk = longest[: prompt - 1]
    branches = []
    for ids, prompt in whole:
        most = min(prompt - 1, len(trunk))
        shared = next((i for i in range(most) if ids[i] != trunk[i]), most)
        branches.append((shared, ids[shared:], prompt - shared))
    size = len(trunk)
    fitting = []
    for branch in sorted(branches, key=lambda branch: branch[0]):
        size += len(branch[1])
        if size > limit:
            break
        fitting.append(branch)
    return Document(trunk, fitting)


def shard(recipe: Recipe, index: int) -> dict[str, Array]:
    """`rows` packed rows, first fit over a few open rows."""
    vocabulary = _vocabulary(str(recipe.tokenizer))
    rng = Random(f"train/{recipe.seed}/{recipe.name}/{index}")
    extra = {"short": recipe.short} if recipe.short else {}
    out: dict[str, Array] = {f: np.zeros((recipe.rows, recipe.length), np.int16) for f in FIELDS}
    out["document"] += PADDING
    out["position"] += np.arange(recipe.length, dtype=np.int16)
    filled = [0] * recipe.rows
    documents = [0] * recipe.rows
    first = 0
    while first < recipe.rows:
        if rng.random() < recipe.conversations:
            problems = second_edition.group(rng, recipe.seed, rng.getrandbits(48))
        else:
            problems = group(rng, recipe.mixture, sentences=recipe.sentences, who=recipe.who, **extra)
        doc = document(vocabulary, problems, recipe.length)
        if not doc.branches:
            continue
        for row in range(first, min(first + 8, recipe.rows)):
            if filled[row] + len(doc) <= recipe.length:
                _place(out, row, filled[row], documents[row], doc)
                filled[row] += len(doc)
                documents[row] += 1
                break
        else:
            first += 1  # nothing open takes it: close the oldest row
    return out


def _place(out: dict[str, Array], row: int, at: int, number: int, doc: Document) -> None:
    view = {f: out[f][row] for f in FIELDS}
    view["document"][at : at + len(doc)] = number
    done = 0
    following = [*doc.trunk[1:], 0]

    def along(stop: int) -> None:
        """The trunk up to `stop`; what follows it there stands behind the branches."""
        nonlocal at, done
        n = stop - done
        view["token"][at : at + n] = doc.trunk[done:stop]
        view["target"][at : at + n] = following[done:stop]
        view["weight"][at : at + n] = [int(i + 1 < len(doc.trunk)) for i in range(done, stop)]
        view["position"][at : at + n] = np.arange(done, stop)
        at, done = at + n, stop

    for branch, (leaves, tokens, prompt) in enumerate(doc.branches, 1):
        along(leaves)
        n = len(tokens)
        view["token"][at : at + n] = tokens
        view["target"][at : at + n - 1] = tokens[1:]
        view["weight"][at : at + prompt - 1] = 1
        view["weight"][at + prompt - 1 : at + n - 1] = 2
        view["position"][at : at + n] = np.arange(leaves, leaves + n)
        view["branch"][at : at + n] = branch
        at += n
    along(len(doc.trunk))


@functools.cache
def _vocabulary(path: str) -> CachedVocabulary:
    return CachedVocabulary(Tokenizer.from_file(path))


def _shard(job: tuple[Recipe, int]) -> dict[str, Array]:
    return shard(*job)


def batches(parts: list[tuple[Recipe, int]], rows: int, workers: int, device: str) -> Iterator[Packed]:
    """For each (recipe, count) of `parts` in turn, `count` batches of `rows` rows, made ahead by worker processes."""
    jobs = [(recipe, i) for recipe, count in parts for i in range(-(-count * rows // recipe.rows))]
    remaining = [count * rows for _, count in parts]
    with multiprocessing.get_context("spawn").Pool(max(1, workers)) as pool:
        waiting: deque[tuple[Recipe, AsyncResult[dict[str, Array]]]] = deque()
        following = iter(jobs)
        while True:
            for job in itertools.islice(following, AHEAD * max(1, workers) - len(waiting)):
                waiting.append((job[0], pool.apply_async(_shard, (job,))))
            if not waiting:
                return
            recipe, made = waiting.popleft()
            arrays = made.get()
            part = next(i for i, (r, _) in enumerate(parts) if r is recipe)
            tensors = {f: torch.from_numpy(arrays[f]) for f in FIELDS}
            if device != "cpu":
                tensors = {f: t.pin_memory().to(device, non_blocking=True) for f, t in tensors.items()}
            for at in range(0, min(recipe.rows, remaining[part]), rows):
                yield Packed(**{f: t[at : at + rows].long() for f, t in tensors.items()})
            remaining[part] -= recipe.rows
