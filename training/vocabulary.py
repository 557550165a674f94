"""Train the embedded model's vocabulary: byte-level BPE over generated conversations, harmony's control tokens on top.

Cuts text as gpt-oss's vocabulary does. Digits are never merged, so every digit is one token. The 21 special tokens sit
at the end in the order o200k_harmony has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from halfbyte.evals.tasks import MIXTURE, group
from halfbyte.harmony.render import render_text
from halfbyte.model.tokenizer import O200K_PATTERN, harmony_special_tokens

FIRST, LAST = 199998, 200018  # of o200k_harmony's special tokens, the ones that have names or stand between them


def special_tokens() -> list[str]:
    by_id = {id: name for name, id in harmony_special_tokens().items()}
    return [by_id[id] for id in range(FIRST, LAST + 1)]


def corpus(seed: int, groups: int) -> Iterator[str]:
    specials = special_tokens()
    for i in range(groups):
        rng = Random(f"vocabulary/{seed}/{i}")
        for p in group(rng, MIXTURE):
            text = render_text(p.worked(), drop_analysis=False)
            for name in specials:
                text = text.replace(name, "\n")
            yield text


def train(size: int, seed: int, groups: int = 4000) -> Tokenizer:
    specials = special_tokens()
    cut = pre_tokenizers.Split(Regex(O200K_PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    # Digits cut apart while merges are learned: no merge joins two, so the plain gpt-oss cut keeps them apart later.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Digits(individual_digits=True), bytes_])
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, groups), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    if tokenizer.get_vocab_size() != size:
        raise SystemExit(f"the vocabulary has {tokenizer.get_vocab_size()} tokens instead of {size}: give more text")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_config(folder, context)


def save_config(folder: Path, context: int) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
