"""The shipped model answers, through halfbyte's own network, and every piece of the architecture matters to it.

Each way of breaking the network must cost at least 30 points on a named task: so any plan that drops sinks, yarn, the
window or the order of the experts fails here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from halfbyte.evals.problem import Frame
from halfbyte.evals.reading import needle
from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates
from halfbyte.model import checkpoint
from halfbyte.model.config import Yarn
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weights import Matrix, Weights

MODEL = Path(__file__).parents[2] / "models" / "tiny"
EACH = 4  # problems of a task


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.for_model(MODEL)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return checkpoint.load(MODEL)


def forced(
    tok: Tokenizer, weights: Weights, tasks: list[str], per_task: int, gates: Gates | None = None
) -> dict[str, float]:
    model = GptOss(weights, gates)

    def predict(tokens: list[int]) -> list[int]:
        solo = SingleSequence(model, len(tokens))
        out: list[int] = []
        for i in range(0, len(tokens), 512):
            out += solo.feed(tokens[i : i + 512], all_logits=True).argmax(-1).tolist()
        return out

    suite = Suite("tiny", 5, per_task, tasks)
    if "needle" in tasks:  # three to four hundred tokens instead of up to five thousand: past the window all the same
        suite.problems["needle"] = [needle(Random(f"short/{i}"), Frame(), (25, 30)) for i in range(per_task)]
    return suite.forced(tok, predict)


@pytest.fixture(scope="module")
def whole(tok: Tokenizer, weights: Weights) -> Callable[[str], float]:
    """A task's share with nothing broken, asked once."""
    return functools.cache(lambda task: forced(tok, weights, [task], EACH)[task])


def swapped(weights: Weights) -> Weights:
    """Experts 0 and 1 exchanged in every layer, their router rows left where they are."""

    def swap(m: Matrix) -> Matrix:
        if isinstance(m, torch.Tensor):
            order = [1, 0, *range(2, m.shape[0])]
            return m[order]
        order = [1, 0, *range(2, m.shape[0])]
        return replace(m, data=m.data[order], scales=m.scales[order])

    out = copy.copy(weights)
    out.layers = [
        replace(
            layer,
            gate_up=swap(layer.gate_up),
            gate_up_bias=layer.gate_up_bias[[1, 0, *range(2, len(layer.gate_up_bias))]],
            down=swap(layer.down),
            down_bias=layer.down_bias[[1, 0, *range(2, len(layer.down_bias))]],
        )
        for layer in weights.layers
    ]
    return out


def exchanged(weights: Weights) -> Weights:
    """Gate and up of every expert exchanged: their rows alternate."""

    def exchange(m: Matrix) -> Matrix:
        order = [row ^ 1 for row in range(m.shape[1])]
        if isinstance(m, torch.Tensor):
            return m[:, order]
        return replace(m, data=m.data[:, order], scales=m.scales[:, order])

    out = copy.copy(weights)
    out.layers = [
        replace(
            layer,
            gate_up=exchange(layer.gate_up),
            gate_up_bias=layer.gate_up_bias[:, [row ^ 1 for row in range(layer.gate_up_bias.shape[1])]],
        )
        for layer in weights.layers
    ]
    return out


def reconfigured(weights: Weights, **changes: object) -> Weights:
    out = copy.copy(weights)
    out.config = weights.config.with_(**changes)
    return out


def test_the_shipped_model_answers(whole: Callable[[str], float]) -> None:
    tasks = [
        "arithmetic",
        "story",
        "lists",
        "letters",
        "chat",
        "memory",
        "reading",
        "extract",
        "tool_call",
        "tool_none",
    ]
    shares = [whole(task) for task in tasks]
    assert sum(shares) / len(shares) >= 0.95
    assert min(shares) >= 0.75


@pytest.mark.parametrize(
    ("task", "break_it"),
    [
        ("tool_call", lambda w: (reconfigured(w, yarn=Yarn(factor=1.0)), None)),
        ("tool_call", lambda w: (swapped(w), None)),
        ("arithmetic", lambda w: (exchanged(w), None)),
        ("lists", lambda w: (w, Gates(sinks="off"))),
        ("needle", lambda w: (reconfigured(w, window=8192), None)),
    ],
    ids=["yarn", "experts", "gate and up", "sinks", "window"],
)
def test_every_piece_of_the_architecture_matters(
    tok: Tokenizer,
    weights: Weights,
    whole: Callable[[str], float],
    task: str,
    break_it: Callable[[Weights], tuple[Weights, Gates | None]],
) -> None:
    broken, gates = break_it(weights)
    assert whole(task) - forced(tok, broken, [task], EACH, gates)[task] >= 0.3


def test_the_size_is_what_was_promised() -> None:
    files = [f for f in MODEL.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 25e6
    assert max(f.stat().st_size for f in files) < 15e6
