"""The header of a GGUF file: metadata, and where each tensor lies; the model's configuration from it.

Checks that every tensor is inside its file and overlaps no other, and that every key of the architecture is used,
harmless or refused, as `config_json.py` does for folders. The vocabulary is `gguf_vocab.py`'s. No tensor is read here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from halfbyte.errors import CheckpointError
from halfbyte.model.config import LayerKind, ModelConfig, Yarn, default_ends
from halfbyte.model.config_json import check_keys
from halfbyte.model.gguf_metadata import MAX_TENSORS, SPLIT, walk
from halfbyte.model.plain_file import quote, truncated
from halfbyte.model.weight_file import Reading, WeightFile

ARCH = "gpt-oss"
# Our own key: GGUF has none for it, and llama.cpp always rounds the yarn ramp outwards. Absent means OpenAI's value.
TRUNCATE_KEY = "halfbyte.rope.yarn_truncate"
MAX_RANK = 4  # ggml's own limit
ALIGNMENTS = tuple(1 << i for i in range(17))

PATTERN = "attention.sliding_window_pattern"
USED = frozenset(f"{ARCH}.{name}" for name in (
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", PATTERN, "block_count", "context_length", "embedding_length", "expert_count",
    "expert_feed_forward_length", "expert_used_count", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
))  # fmt: skip
HARMLESS = frozenset(f"{ARCH}.{name}" for name in ("feed_forward_length", "rope.scaling.finetuned", "vocab_size"))
# Heads are square here: these say head_dim, too, or are refused.
HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
# Key -> the values that change nothing, and what any other value does.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{ARCH}.{name}": (allowed, "makes it another network than gpt-oss")
    for name, allowed in {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.scale": (0.0,),
        "attn_logit_softcapping": (0.0,),
        "embedding_scale": (0.0, 1.0),
        "expert_gating_func": (0, 3),  # none named, or a softmax over the chosen
        "expert_group_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_weights_scale": (0.0, 1.0),
        "final_logit_softcapping": (0.0,),
        "leading_dense_block_count": (0,),
        "logit_scale": (0.0, 1.0),
        "nextn_predict_layers": (0,),
        "residual_scale": (0.0, 1.0),
        "rope.scaling.attn_factor": (1.0,),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_ext_factor": (1.0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "swiglu_clamp_exp": (),
    }.items()
}


@dataclass(frozen=True)
class GgufEntry:
    file: WeightFile
    type: int
    shape: tuple[int, ...]  # outermost first
    offset: int
    nbytes: int


@dataclass
class Header:
    path: Path
    file: WeightFile  # of the metadata
    metadata: dict[str, Any]  # arrays of strings (the vocabulary) are skipped
    tensors: dict[str, GgufEntry]


def read_header(path: Path, reading: Reading | None = None) -> Header:
    weights = WeightFile(path, reading)
    with walk(path, weights.descriptor) as cursor:
        tensor_count = cursor.count(MAX_TENSORS, "tensors")
        metadata = cursor.metadata(keep="")
        infos = []
        for _ in range(tensor_count):
            name, rank = cursor.string(), cursor.u32()
            if rank > MAX_RANK:
                raise CheckpointError(f"{path}: tensor {quote(name)} has {rank} dimensions; fetch it again.")
            dims = [cursor.u64() for _ in range(rank)]
            infos.append((name, tuple(reversed(dims)), cursor.u32(), cursor.u64()))
        alignment = metadata.get("general.alignment", 32)
        if alignment not in ALIGNMENTS:
            raise CheckpointError(f"{path}: general.alignment is {quote(str(alignment))}; fetch it again.")
        start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufEntry] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path} has the tensor {quote(name)} twice; fetch it again.")
        tensors[name] = GgufEntry(weights, kind, shape, start + offset, _nbytes(path, name, shape, kind))
        if start + offset + tensors[name].nbytes > weights.size:
            raise truncated(path, start + offset + tensors[name].nbytes, weights.size)
    last, before = start, ""
    for name, entry in sorted(tensors.items(), key=lambda e: (e[1].offset, e[1].nbytes)):
        if entry.offset < last:
            raise CheckpointError(f"{path}: tensor {quote(name)} overlaps tensor {quote(before)}; fetch it again.")
        last, before = entry.offset + entry.nbytes, name
    return Header(path, weights, metadata, tensors)


def _nbytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return 0  # refused by name, if the model asks for it
    if not shape or shape[-1] % int(block):
        raise CheckpointError(f"{path}: rows of tensor {quote(name)} are not whole blocks of {block}; fetch it again.")
    return math.prod(shape) // int(block) * int(size)


def read_all(path: Path, reading: Reading | None = None) -> Header:
    """The header of a file, or of all the parts it belongs to; the metadata is the first part's."""
    match = SPLIT.match(path.name)
    if match is None:
        header = read_header(path, reading)
        if header.metadata.get("split.count", 1) not in (0, 1):
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
    tensors: dict[str, GgufEntry] = {}
    for h in headers:
        doubled = sorted(tensors.keys() & h.tensors.keys())
        if doubled:
            raise CheckpointError(f"{h.path}: tensor {quote(doubled[0])} is in an earlier part, too; fetch it again.")
        tensors |= h.tensors
    return Header(parts[0], headers[0].file, headers[0].metadata, tensors)


def config_from(header: Header) -> ModelConfig:
    meta, path = header.metadata, header.path
    arch = meta.get("general.architecture")
    if arch == "gptoss":
        raise CheckpointError(
            f"{path} is Ollama's own conversion (architecture gptoss); get the GGUF that llama.cpp uses, or the folder."
        )
    if arch != ARCH:
        raise CheckpointError(f"{path} holds the architecture {arch!r}, but halfbyte serves gpt-oss models only.")

    def value(name: str, kinds: tuple[type, ...], default: Any) -> Any:
        entry = meta.get(f"{ARCH}.{name}", default)
        if entry is None:
            raise CheckpointError(f"{path} has no key {ARCH}.{name}; convert the model again.")
        if type(entry) not in kinds:
            raise CheckpointError(f"{path}: {ARCH}.{name} is {quote(str(entry))}; convert the model again.")
        return entry

    def integer(name: str, default: int | None = None) -> int:
        return int(value(name, (int,), default))

    def number(name: str, default: float | None = None) -> float:
        return float(value(name, (int, float), default))

    scaling = value("rope.scaling.type", (str,), "none")
    if scaling not in ("yarn", "none"):
        raise CheckpointError(f"{path}: rope scaling {quote(scaling)} is not supported; gpt-oss uses yarn.")
    yarn = Yarn(factor=1.0)
    if scaling == "yarn":
        yarn = Yarn(
            factor=number("rope.scaling.factor"),
            original_context=integer("rope.scaling.original_context_length"),
            beta_fast=number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=number("rope.scaling.yarn_beta_slow", 1.0),
            truncate=bool(meta.get(TRUNCATE_KEY, False)),
        )
    elif number("rope.scaling.factor", 1.0) not in (0.0, 1.0):
        raise CheckpointError(f"{path}: {ARCH}.rope.scaling.factor has no rope.scaling.type; convert the model again.")
    embed = header.tensors.get("token_embd.weight")
    if embed is None or not embed.shape:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'; fetch it again.")
    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // max(1, heads))
    refused = REFUSED | {f"{ARCH}.{name}": ((head_dim,), "cuts heads otherwise") for name in HEAD_SIZES}
    check_keys({k: v for k, v in meta.items() if k.startswith(f"{ARCH}.")}, USED, HARMLESS, refused, str(path))
    eos, pad = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "padding"))
    if isinstance(eos, int) and not 0 <= eos < embed.shape[0]:
        raise CheckpointError(f"{path}: the end token is {eos}, but the vocabulary has {embed.shape[0]} tokens.")
    try:
        return ModelConfig(
            layers=integer("block_count"),
            hidden=hidden,
            intermediate=integer("expert_feed_forward_length"),
            experts=integer("expert_count"),
            top_k=integer("expert_used_count"),
            heads=heads,
            kv_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=embed.shape[0],
            window=integer("attention.sliding_window"),
            max_context=integer("context_length"),
            rope_theta=round(number("rope.freq_base"), 3),  # stored as float32
            yarn=yarn,
            # float32 again: 1e-5, not 9.9999e-6
            norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
            layer_kinds=_layer_kinds(meta.get(f"{ARCH}.{PATTERN}", 2), integer("block_count"), path),
            eos_tokens=(eos,) if isinstance(eos, int) else default_ends(embed.shape[0]),
            pad_token=pad if isinstance(pad, int) else ModelConfig.pad_token,
            name=str(meta.get("general.name") or path.stem),
        )
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None


def _layer_kinds(pattern: Any, layers: int, path: Path) -> tuple[LayerKind, ...]:
    """Sliding or full for each layer: from a list that says which slide, or from n: the last of every n is full."""
    if isinstance(pattern, list) and len(pattern) == layers and all(type(slides) is bool for slides in pattern):
        return tuple("sliding" if slides else "full" for slides in pattern)
    if type(pattern) is not int or pattern != 2:
        raise CheckpointError(
            f"{path}: {ARCH}.{PATTERN} {quote(str(pattern))} makes it another network than gpt-oss, so halfbyte cannot"
            " serve it."
        )
    return ()  # alternating, sliding first
