"""Conversations to packed rows: groups of problems become documents with one beginning and several branches.

A shard is a pure function of (seed, name, index), so a run can be repeated and worker processes need no coordination.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from network import Packed

from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import MIXTURE, group
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

Array = npt.NDArray[np.int16]
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
    beginning: list[int]
    branches: list[tuple[list[int], int]]  # tokens after the beginning, and how many of them are still prompt

    def __len__(self) -> int:
        return len(self.beginning) + sum(len(tokens) for tokens, _ in self.branches)


def document(vocabulary: CachedVocabulary, problems: list[Problem], limit: int) -> Document:
    """Share the longest common beginning; drop branches that would pass `limit` tokens."""
    whole = []
    for p in problems:
        ids, _ = render_training_example(vocabulary, p.worked())
        whole.append((ids, len(render_prompt(vocabulary, p.prompt()))))
    shared = min(prompt for _, prompt in whole) - 1
    first = whole[0][0]
    for ids, _ in whole[1:]:
        same = next((i for i in range(shared) if ids[i] != first[i]), shared)
        shared = min(shared, same)
    branches = [(ids[shared:], prompt - shared) for ids, prompt in whole]
    size = shared
    fitting = []
    for tokens, prompt in branches:
        size += len(tokens)
        if size > limit:
            break
        fitting.append((tokens, prompt))
    return Document(first[:shared], fitting)


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
    begin = len(doc.beginning)
    view = {f: out[f][row] for f in FIELDS}
    view["document"][at : at + len(doc)] = number
    view["token"][at : at + begin] = doc.beginning
    view["target"][at : at + begin - 1] = doc.beginning[1:]
    view["weight"][at : at + begin - 1] = 1
    view["position"][at : at + begin] = np.arange(begin)
    at += begin
    for branch, (tokens, prompt) in enumerate(doc.branches, 1):
        n = len(tokens)
        view["token"][at : at + n] = tokens
        view["target"][at : at + n - 1] = tokens[1:]
        view["weight"][at : at + prompt - 1] = 1
        view["weight"][at + prompt - 1 : at + n - 1] = 2
        view["position"][at : at + n] = np.arange(begin, begin + n)
        view["branch"][at : at + n] = branch
        at += n


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
        for recipe, arrays in zip((recipe for recipe, _ in jobs), pool.imap(_shard, jobs), strict=True):
            part = next(i for i, (r, _) in enumerate(parts) if r is recipe)
            tensors = {f: torch.from_numpy(arrays[f]) for f in FIELDS}
            if device != "cpu":
                tensors = {f: t.pin_memory().to(device, non_blocking=True) for f, t in tensors.items()}
            for at in range(0, min(recipe.rows, remaining[part]), rows):
                yield Packed(**{f: t[at : at + rows].long() for f, t in tensors.items()})
            remaining[part] -= recipe.rows
