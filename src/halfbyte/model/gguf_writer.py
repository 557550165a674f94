"""Writes a GGUF that llama.cpp runs: tensors, hyperparameters and the vocabulary, streamed one role at a time.

Block-scaled tensors keep their numbers (MXFP4 as MXFP4, q8 as Q8_0); norms, biases, sinks and the router become F32,
as llama.cpp wants them; dense matrices take the type asked for. What llama.cpp would compute differently (another
layer pattern, other clamps, other yarn betas) is refused: GGUF has no key for it, and the loss would go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError
from halfbyte.formats import layouts
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.config import ModelConfig
from halfbyte.model.gguf_header import ARCH, TRUNCATE_KEY
from halfbyte.model.gguf_io import FORMAT_OF_TYPE, INTERLEAVED, stored_shapes, tensor_names
from halfbyte.model.gguf_vocab import CONTROL, USER_DEFINED, GGUFVocab, read_gguf_vocab
from halfbyte.model.plain_file import refusing
from halfbyte.model.tokenizer import SPELLING
from halfbyte.model.tokenizer_json import read_tokenizer_json
from halfbyte.model.weight_file import CHUNK, write_tensor, write_then_rename
from halfbyte.model.weights import DTYPES, GROUPS, Matrix, Source, WeightFormat, roles, slice_rows, split_parts

TYPES: dict[WeightFormat, GGMLQuantizationType] = {kind: t for t, kind in FORMAT_OF_TYPE.items()}
NORMAL, UNUSED = 1, 5  # of tokenizer.ggml.token_type, with the two of gguf_vocab.py


@dataclass(frozen=True)
class GgufOutputTensor:
    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    layer: int | None
    role: str
    part: int

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[TYPES[self.format]]
        return math.prod(self.shape) // int(block) * int(size)


def write_file(
    source: Source,
    path: Path,
    *,
    dense: WeightFormat | None = None,
    tokenizer: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """`dense` is the type of unquantised matrices (None keeps each one's own); `tokenizer` is a `tokenizer.json`, or
    another GGUF file with the vocabulary."""
    _refuse(source.config)
    outputs = list(_outputs(source, dense))
    total = sum(p.nbytes for p in outputs)
    with write_then_rename(path, folder=False, needs=total) as hidden:
        _write_header(hidden, source.config, outputs, tokenizer)
        done = 0
        current: tuple[tuple[int | None, str] | None, Sequence[Matrix]] = (None, ())
        with hidden.open("ab") as file:
            file.write(b"\0" * (-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for p in outputs:
                if current[0] != (p.layer, p.role):
                    current = (None, ())  # let the last role go before the next is made
                    parts = source.parts(p.layer, p.role)
                    current = ((p.layer, p.role), split_parts(source.config, p.role, parts))
                start = file.tell()
                for piece in _encode(current[1], p):
                    write_tensor(file, piece)
                assert file.tell() - start == p.nbytes, (p.name, file.tell() - start, p.nbytes)
                file.write(b"\0" * (-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
                done += p.nbytes
                if progress is not None:
                    progress(done, total, p.name)


def _refuse(config: ModelConfig) -> None:
    problems = []
    if any(kind != ("sliding" if i % 2 == 0 else "full") for i, kind in enumerate(config.layer_kinds)):
        problems.append("its layers do not alternate sliding, full")
    if (config.swiglu_limit, config.swiglu_alpha) != (7.0, 1.702):
        problems.append("its swiglu limit or alpha is not 7.0 and 1.702")
    if config.yarn.factor != 1.0 and (config.yarn.beta_fast, config.yarn.beta_slow) != (32.0, 1.0):
        problems.append("its yarn betas are not 32 and 1")
    if config.yarn.attention_factor is not None:
        problems.append("its rope has an attention factor of its own")
    if problems:
        raise CheckpointError(f"GGUF cannot say how this model differs from gpt-oss: {', '.join(problems)}.")


def _outputs(source: Source, dense: WeightFormat | None) -> Iterator[GgufOutputTensor]:
    for layer, role in roles(source.config):
        stored_formats = source.formats(layer, role)
        names, shapes = tensor_names(layer, role), stored_shapes(source.config, role)
        for i, (name, shape) in enumerate(zip(names, shapes)):
            format = stored_formats[i if len(stored_formats) == len(names) else 0]
            if role not in GROUPS and role != "embed":
                format = "f32"
            elif format in DTYPES and dense is not None:
                format = dense
            if format not in DTYPES and shape[-1] % 32:
                raise CheckpointError(f"{name} cannot be {format}: its rows of {shape[-1]} are not whole groups of 32.")
            yield GgufOutputTensor(name, format, shape, layer, role, i)


def _encode(parts: Sequence[Matrix], p: GgufOutputTensor) -> Iterator[Tensor]:
    """The bytes of one GGUF tensor, some leading rows at a time."""
    matrix = parts[0] if p.role in INTERLEAVED else parts[p.part]
    rows = matrix.shape[0]
    per_row = max(1, 4 * math.prod(matrix.shape[1:]))
    for start in range(0, rows, max(1, CHUNK // per_row)):
        piece = slice_rows(matrix, start, min(rows, start + max(1, CHUNK // per_row)))
        if p.role in INTERLEAVED:
            piece = layouts.deinterleave(piece)[p.part] if isinstance(piece, MXTensor) else piece[:, p.part :: 2]
        if p.format in DTYPES:
            if isinstance(piece, MXTensor):
                raise AssertionError(f"{p.name}: {piece.format} cannot be written as {p.format}")
            yield piece.to(DTYPES[p.format])
            continue
        if isinstance(piece, Tensor):
            piece = formats.quantize(piece, p.format)
        assert piece.format == p.format, (p.name, piece.format, p.format)
        yield layouts.convert(piece, "gguf").data


# ---- metadata -----------------------------------------------------------------------------------


def _write_header(path: Path, config: ModelConfig, outputs: Sequence[GgufOutputTensor], tokenizer: Path | None) -> None:
    w = gguf.GGUFWriter(path, ARCH)
    w.add_type(gguf.GGUFType.MODEL)
    w.add_name(config.name)
    w.add_context_length(config.max_context)
    w.add_embedding_length(config.hidden)
    w.add_block_count(config.layers)
    w.add_feed_forward_length(config.intermediate)
    w.add_expert_feed_forward_length(config.intermediate)
    w.add_expert_count(config.experts)
    w.add_expert_used_count(config.top_k)
    w.add_head_count(config.heads)
    w.add_head_count_kv(config.kv_heads)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    w.add_rope_dimension_count(config.head_dim)
    w.add_layer_norm_rms_eps(config.norm_eps)
    w.add_sliding_window(config.window)
    w.add_rope_freq_base(config.rope_theta)
    if config.yarn.factor != 1.0:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(config.yarn.factor)
        w.add_rope_scaling_orig_ctx_len(config.yarn.original_context)
        w.add_bool(TRUNCATE_KEY, config.yarn.truncate)
    w.add_vocab_size(config.vocab)
    experts = next(p.format for p in outputs if p.role == "gate_up")
    if experts == "mxfp4":
        w.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(w, config, tokenizer)
    for p in outputs:
        block, size = GGML_QUANT_SIZES[TYPES[p.format]]
        stored = (*p.shape[:-1], p.shape[-1] // block * size)
        w.add_tensor_info(p.name, stored, np.dtype(np.uint8), p.nbytes, raw_dtype=TYPES[p.format])
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
    finally:
        w.close()


def _add_vocabulary(w: Any, config: ModelConfig, tokenizer: Path | None) -> None:
    """A byte-level BPE vocabulary, or a placeholder of the right size for models without one."""
    if tokenizer is None:
        v = _placeholder(config.vocab)
    elif tokenizer.suffix == ".gguf":
        v = read_gguf_vocab(tokenizer)
    else:
        v = read_tokenizer(tokenizer, config.vocab)
    w.add_tokenizer_model(v.model)
    w.add_tokenizer_pre(v.pre)
    w.add_token_list(v.tokens)
    w.add_token_types(v.types)
    w.add_token_merges(v.merges)
    ids = {token: i for i, token in enumerate(v.tokens)}
    w.add_bos_token_id(ids.get("<|startoftext|>", config.pad_token))
    for id in config.eos_tokens[:1]:
        w.add_eos_token_id(id)
    w.add_pad_token_id(config.pad_token)
    w.add_add_bos_token(False)
    template = tokenizer.with_name("chat_template.jinja") if tokenizer is not None else None
    if template is not None and template.exists():
        w.add_chat_template(template.read_text(encoding="utf-8"))


def _placeholder(vocab: int) -> GGUFVocab:
    """The 256 byte tokens as far as they fit, the one merge that readers insist on, then names no text produces."""
    tokens = [SPELLING[i] if i < 256 else f"<unused{i}>" for i in range(vocab)]
    types = [NORMAL if i <= 256 else UNUSED for i in range(vocab)]
    tokens[min(256, vocab - 1)] = tokens[0] * 2
    return GGUFVocab("gpt2", "gpt-4o", tokens, types, [f"{tokens[0]} {tokens[0]}"])


def read_tokenizer(path: Path, vocab: int) -> GGUFVocab:
    """A byte-level BPE `tokenizer.json`; ids that it leaves out become unused tokens."""
    raw = read_tokenizer_json(path)
    tokens = [f"<unused{i}>" for i in range(vocab)]
    types = [UNUSED] * vocab
    named = [(id, token, NORMAL) for token, id in raw.model.vocab.items()]
    named += [(a.id, a.content, CONTROL if a.special else USER_DEFINED) for a in raw.added_tokens]
    for id, token, kind in named:
        if id >= vocab:
            raise CheckpointError(f"{path} has tokens past the model's vocabulary of {vocab}; use the model's own.")
        tokens[id], types[id] = token, kind
    with refusing(path):
        merges = [m if isinstance(m, str) else " ".join(m) for m in raw.model.merges]
        return GGUFVocab("gpt2", _pre_tokenizer(raw.pre_tokenizer, path), tokens, types, merges)


def _pre_tokenizer(raw: Any, path: Path) -> str:
    """The name that llama.cpp has for this way of cutting text: one of the two that gpt-oss vocabularies use."""
    steps = raw["pretokenizers"] if raw is not None and raw["type"] == "Sequence" else [raw]
    patterns = [str(s["pattern"].get("Regex")) for s in steps if s is not None and s["type"] == "Split"]
    if any(r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" in p and r"\p{N}{1,3}" in p for p in patterns):
        return "gpt-4o"
    if not patterns and any(s is not None and s["type"] == "ByteLevel" and s.get("use_regex", True) for s in steps):
        return "gpt-2"
    raise CheckpointError(f"{path} cuts text in a way that GGUF has no name for; write safetensors instead.")
