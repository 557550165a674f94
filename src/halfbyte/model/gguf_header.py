"""The header of a GGUF file: metadata, and where each tensor lies; the model's configuration from it.

Reads numbers, strings and offsets, checks that every tensor is inside its file, and skips the vocabulary, which
`gguf_vocab.py` reads. No tensor is read here. The `gguf` package's own reader maps the whole file and cannot say where
a truncated one ends; writing uses the package.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from halfbyte.errors import CheckpointError
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.weight_file import Reading, WeightFile, truncated

ARCH = "gpt-oss"
SPLIT = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
# Our own key: GGUF has none for it, and llama.cpp always rounds the yarn ramp outwards. Absent means OpenAI's value.
TRUNCATE_KEY = "halfbyte.rope.yarn_truncate"


@dataclass(frozen=True)
class Entry:
    file: WeightFile
    type: int
    shape: tuple[int, ...]  # outermost first
    offset: int
    nbytes: int


@dataclass
class Header:
    path: Path
    metadata: dict[str, Any]  # arrays of strings (the vocabulary) are skipped
    tensors: dict[str, Entry]


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads a header front to back; running off the end of the file is a truncated file."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.file, self.size = path, file, size

    def take(self, count: int) -> bytes:
        raw = self.file.read(count) if count <= self.size else b""
        if len(raw) != count:
            raise truncated(self.path, min(self.file.tell() + count, 2**63), self.size)
        return raw

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} has a metadata type {kind} that GGUF does not define; fetch it again.")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            raw = self.take(count * struct.calcsize(code))
            return [x[0] for x in struct.iter_unpack(code, raw)]
        for _ in range(count):
            self.value(inner)
        return None


def read_header(path: Path, reading: Reading | None = None) -> Header:
    weights = WeightFile(path, reading)
    with path.open("rb") as file:
        cursor = _Cursor(path, file, weights.size)
        if weights.size < 4 or cursor.take(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file; give a Hugging Face model folder, or a .gguf file.")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}, but halfbyte reads 2 and 3, little endian.")
        tensor_count, key_count = cursor.number("<Q"), cursor.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("<I"))
        infos = []
        for _ in range(tensor_count):
            name = cursor.string()
            dims = [cursor.number("<Q") for _ in range(cursor.number("<I"))]
            infos.append((name, tuple(reversed(dims)), cursor.number("<I"), cursor.number("<Q")))
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, Entry] = {}
    for name, shape, kind, offset in infos:
        nbytes = _nbytes(shape, kind)
        tensors[name] = Entry(weights, kind, shape, start + offset, nbytes)
        if start + offset + nbytes > weights.size:
            raise truncated(path, start + offset + nbytes, weights.size)
    return Header(path, metadata, tensors)


def _nbytes(shape: tuple[int, ...], kind: int) -> int:
    count = 1
    for d in shape:
        count *= d
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 0  # refused by name, if the model asks for it
    return count // int(block) * int(size)


def read_all(path: Path, reading: Reading | None = None) -> Header:
    """The header of a file, or of all the parts it belongs to; the metadata is the first part's."""
    match = SPLIT.match(path.name)
    if match is None:
        header = read_header(path, reading)
        if int(header.metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{path} is one part of a split GGUF, but its name has lost the -00001-of-0000N that finds the others."
            )
        return header
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for part in parts:
        if not part.exists():
            raise CheckpointError(f"{part} is not there; a split GGUF needs all {count} parts, so fetch it.")
    headers = [read_header(part, reading) for part in parts]
    tensors = {name: entry for h in headers for name, entry in h.tensors.items()}
    return Header(parts[0], headers[0].metadata, tensors)


def config_from(header: Header) -> ModelConfig:
    meta, path = header.metadata, header.path
    arch = meta.get("general.architecture")
    if arch == "gptoss":
        raise CheckpointError(
            f"{path} is Ollama's own conversion (architecture gptoss); get the GGUF that llama.cpp uses, or the folder."
        )
    if arch != ARCH:
        raise CheckpointError(f"{path} holds the architecture {arch!r}, but halfbyte serves gpt-oss models only.")

    def key(name: str, default: Any = None) -> Any:
        value = meta.get(f"{ARCH}.{name}", default)
        if value is None:
            raise CheckpointError(f"{path} does not say {ARCH}.{name}; convert the model again.")
        return value

    scaling = meta.get(f"{ARCH}.rope.scaling.type", "none")
    if scaling not in ("yarn", "none"):
        raise CheckpointError(f"{path}: rope scaling {scaling!r} is not supported; gpt-oss uses yarn.")
    yarn = Yarn(factor=1.0)
    if scaling == "yarn":
        yarn = Yarn(
            factor=float(key("rope.scaling.factor")),
            original_context=int(key("rope.scaling.original_context_length")),
            beta_fast=float(key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(key("rope.scaling.yarn_beta_slow", 1.0)),
            truncate=bool(meta.get(TRUNCATE_KEY, False)),
        )
    embed = header.tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'; fetch it again.")
    eos = meta.get("tokenizer.ggml.eos_token_id")
    pad = meta.get("tokenizer.ggml.padding_token_id")
    heads = int(key("attention.head_count"))
    hidden = int(key("embedding_length"))
    return ModelConfig(
        layers=int(key("block_count")),
        hidden=hidden,
        intermediate=int(key("expert_feed_forward_length")),
        experts=int(key("expert_count")),
        top_k=int(key("expert_used_count")),
        heads=heads,
        kv_heads=int(key("attention.head_count_kv", heads)),
        head_dim=int(key("attention.key_length", hidden // heads)),
        vocab=embed.shape[0],
        window=int(key("attention.sliding_window")),
        max_context=int(key("context_length")),
        rope_theta=round(float(key("rope.freq_base")), 3),  # stored as float32
        yarn=yarn,
        norm_eps=float(f"{float(key('attention.layer_norm_rms_epsilon')):.6g}"),  # float32 again: 1e-5, not 9.9999e-6
        eos_tokens=(int(eos),) if eos is not None else ModelConfig.eos_tokens,
        pad_token=int(pad) if pad is not None else ModelConfig.pad_token,
        name=str(meta.get("general.name") or path.stem),
    )
