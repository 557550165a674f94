"""What training reads: documents that share their beginning hold the tokens that plain rendering gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

import data

from halfbyte.evals.tasks import group
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "models" / "tiny"


def test_documents_hold_the_same_tokens_as_plain_rendering() -> None:
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    cached = data.CachedVocabulary(tokenizer)
    for i in range(40):
        problems = group(Random(f"documents/{i}"), sentences=(10, 60))
        doc = data.document(cached, problems, 100_000)
        assert len(doc.branches) == len(problems)
        for p, (tokens, prompt) in zip(problems, doc.branches, strict=True):
            assert doc.beginning + tokens == render_training_example(tokenizer, p.worked())[0]
            assert len(doc.beginning) + prompt == len(render_prompt(tokenizer, p.prompt()))
