"""What training reads: documents that share their beginning hold the tokens that plain rendering gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import data
import second_edition
import torch
from network import Packed, dense_masks

from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import group
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "models" / "tiny"


def test_documents_hold_the_same_tokens_as_plain_rendering() -> None:
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    cached = data.CachedVocabulary(tokenizer)
    for i in range(40):
        problems = group(Random(f"documents/{i}"), sentences=(10, 60)) if i % 2 else conversations(i)
        doc = data.document(cached, problems, 100_000)
        assert len(doc.branches) == len(problems)
        paths = sorted((doc.trunk[:leaves] + tokens, leaves + prompt) for leaves, tokens, prompt in doc.branches)
        assert paths == sorted(
            (render_training_example(tokenizer, p.worked())[0], len(render_prompt(tokenizer, p.prompt())))
            for p in problems
        )


def conversations(i: int) -> list[Problem]:
    return second_edition.group(Random(f"conversations/{i}"), 3, i)


def test_a_row_shows_each_branch_what_its_conversation_holds_and_scores_what_the_model_writes() -> None:
    """Along training's mask a branch reads as its conversation; only the assistant's tokens are replies."""
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    recipe = data.Recipe("rows", 7, TINY / "tokenizer.json", 4096, 2, conversations=1.0)
    row = {f: torch.from_numpy(v[:1]).long() for f, v in data.shard(recipe, 0).items()}
    full, _ = dense_masks(Packed(**row), 128)
    token, target, weight, position = (row[f][0] for f in ("token", "target", "weight", "position"))
    specials = tokenizer.special
    ends = {specials[name] for name in ("<|return|>", "<|call|>")}
    replies = 0
    for at in (weight == 2).nonzero()[:, 0].tolist():
        if int(target[at]) not in ends:
            assert int(token[at + 1]) == int(target[at])
            continue
        seen = full[0, 0, at].nonzero()[:, 0]
        assert position[seen].tolist() == list(range(int(position[at]) + 1))  # one path, without holes
        ids = [*token[seen].tolist(), int(target[at])]
        assert ids[0] == specials["<|start|>"]
        scored = int((weight[seen] == 2).sum())
        text = tokenizer.decode(ids)
        prompt, reply = tokenizer.decode(ids[:-scored]), tokenizer.decode(ids[-scored:])
        assert prompt.endswith("<|start|>assistant"), prompt[-80:]
        assert text == prompt + reply
        assert reply.startswith(("<|channel|>", " to=functions."))
        replies += 1
    assert replies > 20
