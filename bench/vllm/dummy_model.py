"""A model folder without weights, for `vllm serve --load-format dummy`: configuration, vocabulary, nothing to download.

Random weights of a true shape speak gpt-oss's vocabulary, as they do in halfbyte: a tokenizer.json that decodes every
token as the real one does (its merges are left out, because prompts are token ids), and the file of ranks that vLLM's
chat code would fetch.
"""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.model import checkpoint, load
from halfbyte.model.config_json import to_config_json
from halfbyte.model.tokenizer import O200K_TOKENS, Tokenizer, o200k_file

RANKS = "o200k_base.tiktoken"


def write(model: str | None, folder: Path) -> Path:
    """The folder of `random:120b`, or of a model folder, which is served with its experts in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    name = load.resolve_model(model)
    config = to_config_json(load.config_of(name))
    if name.path is None:
        write_vocabulary(Tokenizer.gpt_oss(), folder)
    else:
        config.pop("quantization_config", None)  # vLLM's own MXFP4 needs a GPU, or AMX
        for companion in checkpoint.COMPANIONS:
            if (name.path / companion).is_file():
                (folder / companion).write_bytes((name.path / companion).read_bytes())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    letters = byte_letters()
    vocab = {"".join(letters[b] for b in tokenizer.token_bytes(i)): i for i in range(O200K_TOKENS)}
    special = [
        {
            "id": i, "content": tokenizer.special_name(i) or f"<|reserved_{i}|>", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }
        for i in range(O200K_TOKENS, tokenizer.vocab_size)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    body = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": False},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>", "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / RANKS).write_bytes(o200k_file())


def byte_letters() -> dict[int, str]:
    """The letter by which byte-level vocabularies write each byte: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printed]
    return {b: chr(b) for b in printed} | {b: chr(256 + i) for i, b in enumerate(others)}
