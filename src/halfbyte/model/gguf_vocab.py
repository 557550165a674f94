"""The vocabulary stored in a GGUF file's metadata, read without touching its tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.model.gguf_metadata import MAX_TENSORS, walk
from halfbyte.model.plain_file import open_regular

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@dataclass(frozen=True)
class GGUFVocab:
    model: str  # "gpt2" means byte-level BPE
    pre: str  # the name of the pre-tokenizer
    tokens: list[str]
    types: list[int]
    merges: list[str]


def read_gguf_vocab(path: Path) -> GGUFVocab:
    descriptor, _ = open_regular(path)
    try:
        return vocab_in(path, descriptor)
    finally:
        os.close(descriptor)


def vocab_in(path: Path, descriptor: int) -> GGUFVocab:
    """The vocabulary of a file that is open."""
    with walk(path, descriptor) as cursor:
        cursor.count(MAX_TENSORS, "tensors")
        metadata = cursor.metadata(keep=PREFIX)

    def entries(name: str, kind: type[Any]) -> list[Any]:
        value = metadata.get(PREFIX + name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(x) is kind for x in value):
            raise CheckpointError(f"{path}: {PREFIX}{name} is not a list of {kind.__name__}; convert the model again.")
        return value

    tokens = entries("tokens", str)
    if not tokens:
        raise CheckpointError(f"{path} carries no vocabulary; convert it again with its tokenizer.")
    return GGUFVocab(
        model=str(metadata.get(f"{PREFIX}model")),
        pre=str(metadata.get(f"{PREFIX}pre") or "default"),
        tokens=tokens,
        types=entries("token_type", int),
        merges=entries("merges", str),
    )
