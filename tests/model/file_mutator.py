"""A seeded mutator over every header, index, configuration and tokenizer file of a model, and over its numbers, and the
loop that loads them.

    python tests/model/file_mutator.py FOLDER SEED COUNT

makes a small model in FOLDER (as a folder, with its numbers in other types, as a GGUF file, as one in parts, as one of
other block types), damages it COUNT times and prints one JSON object: how many were refused and how many loaded, what
came out that was no refusal, and how much memory all of it took at most. What loads is also inspected, now and then,
and a model with other numbers computes a step: its logits are numbers, or it says that they are none. A process of its
own, so that the peak of memory is its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import cache_folder
from halfbyte.inspection import inspect_model
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gguf_blocks import READ_AS_Q8
from halfbyte.model.load import load_model, resolve_model, tokenizer_of
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.roofline import gpu_named

INSPECTED = 0.2  # the share of what loads that is inspected, and computes a step
HANG_SECONDS = 300  # of the clock on the wall, and a busy machine may stop us for a while
CONFIG = ModelConfig(
    layers=2, hidden=64, intermediate=32, experts=4, top_k=2, heads=4, kv_heads=2, head_dim=16, vocab=300, window=12,
    max_context=256, yarn=Yarn(8.0, 32), eos_tokens=(1,), pad_token=0, name="hostile",
)  # fmt: skip
# Written as text, so that numbers no float can hold, and constants JSON does not have, get into files.
LITERALS = (
    "null", "true", "false", "0", "-1", "1", "2", "1.5", "-0.0", "1e400", "1e-400", "4294967296", "9223372036854775808",
    "-9223372036854775809", "10000000000", "1" + "0" * 40, "9" * 5000, "NaN", "Infinity", '""', '"x"', '"yarn"', "[]",
    "{}", "[[[]]]", '{"a": 1}', '"\\ud800"', '"\\u0000"', '"../x"', '"' + "y" * 5000 + '"', "[" * 3000 + "]" * 3000,
    "[1, 2, 3]", '["full_attention"]', '{"rope_type": "yarn"}', "[0, -8]", "[0.5, 8]", "[8, 0]", '"BF16"', '"F64"',
)  # fmt: skip


class HangError(BaseException):
    pass


class Text(str):
    """JSON that is put into a file as it is."""


def tokenizer_json() -> dict[str, Any]:
    """All bytes, some merges, some control tokens: enough to be read by every branch."""
    from halfbyte.model.tokenizer import O200K_PATTERN, _spell

    vocab = {_spell(bytes([b])): b for b in range(256)} | {"th": 256, "the": 257}
    added = [{"id": 258 + i, "content": f"<|{n}|>", "special": True} for i, n in enumerate(("return", "call", "end"))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [a | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) for a in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "h"], ["th", "e"]]},
    }


def make_models(root: Path) -> tuple[Path, Path]:
    """(folder with an index and several shards, GGUF file)"""
    folder, file = root / "model", root / "model.gguf"
    synthetic.write_safetensors(CONFIG, 1, folder, max_shard_bytes=60_000)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    synthetic.write_gguf(CONFIG, 1, file, tokenizer=folder / "tokenizer.json")
    return folder, file


# Where a block has its float16 scales, in types that the gguf package reads and does not write.
SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82), GGMLQuantizationType.Q3_K: (108,), GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2), GGMLQuantizationType.Q6_K: (208,),
}  # fmt: skip


def encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of this type; for types that the gguf package cannot write, blocks whose numbers are like the values."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        draw = np.random.default_rng(values.size)
        raw = draw.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        scale = np.array([2**-12], dtype=np.float16).view(np.uint8)
        for at in SCALES.get(kind, (0,)):
            raw[:, at : at + 2] = scale
        return raw.reshape(*values.shape[:-1], -1)


def make_blocks(root: Path) -> Path:
    """A GGUF file whose matrices have a block type each that is read as q8."""
    plain, file = root / "plain" / "model.gguf", root / "blocks.gguf"
    synthetic.write_gguf(CONFIG.with_(head_dim=64), 1, plain)
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(file, "gpt-oss")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    wide = iter([k for k in READ_AS_Q8 if gguf.GGML_QUANT_SIZES[k][0] == 256] * 2)
    narrow = itertools.cycle([k for k in READ_AS_Q8 if gguf.GGML_QUANT_SIZES[k][0] == 32])
    for tensor in reader.tensors:
        data, kind = np.array(tensor.data), tensor.tensor_type
        if kind == GGMLQuantizationType.BF16:
            values = np.array(gguf.quants.dequantize(data, kind))
            kind = next(wide) if values.shape[-1] == 256 else next(narrow)
            data = encode(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain.unlink()
    return file


def make_parts(root: Path, file: Path) -> list[Path]:
    """The GGUF file in three parts, as llama.cpp splits it."""
    reader, whole = gguf.GGUFReader(file), root / "parts" / "model.gguf"
    whole.parent.mkdir()
    writer = gguf.GGUFWriter(whole, "gpt-oss", split_max_tensors=-(-len(reader.tensors) // 3))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(whole.parent.glob("*.gguf"))


def make_wide(root: Path, folder: Path) -> Path:
    """The folder with its bf16 numbers as float16 and float32, as merges save them."""
    wide = root / "wide"
    wide.mkdir()
    for path in folder.glob("*.json"):
        (wide / path.name).write_bytes(path.read_bytes())
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        dtype = (torch.float16, torch.float32)[number % 2]
        tensors = {n: t.to(dtype) if t.dtype == torch.bfloat16 else t for n, t in load_file(path).items()}
        save_file(tensors, wide / path.name)
    return wide


# ---- damage --------------------------------------------------------------------------------------------------------


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of parsed JSON."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from nodes(item)


def dump(value: Any) -> str:
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key.rstrip(chr(1)))}:{dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def damage_json(raw: bytes, draw: random.Random) -> bytes:
    value = json.loads(raw)
    for _ in range(draw.choice([1, 1, 2, 3])):
        holder, key = draw.choice(list(nodes(value)))
        action = draw.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[f"{key}\1"] = draw.choice(
                [holder[key], Text(draw.choice(LITERALS))]
            )  # written without the \1: twice
        elif action == 2 and isinstance(holder, dict):
            holder[draw.choice(["x", "", "\u2028", f"{key} ", str(key).upper()])] = holder.pop(key)
        else:
            holder[key] = Text(draw.choice(LITERALS))
        if not value:
            break
    return dump(value).encode("utf-8", "surrogatepass")


def damage_bytes(raw: bytes, draw: random.Random, front: int) -> bytes:
    """Within the first `front` bytes, where the structure is."""
    body = bytearray(raw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, size = draw.randrange(max(1, min(front, len(body)))), draw.choice([1, 2, 4, 8])
        action = draw.randrange(7)
        if action == 0:
            body[at : at + 1] = bytes([draw.randrange(256)])
        elif action == 1:
            number = draw.choice(
                [0, 1, 2, 3, 8, 9, 255, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1, draw.randrange(2**64)]
            )
            body[at : at + size] = struct.pack("<Q", number)[:size]
        elif action == 2:
            del body[at:]
        elif action == 3:
            del body[at : at + draw.choice([1, 4, 100])]
        elif action == 4:
            body[at:at] = draw.randbytes(draw.choice([1, 8, 100]))
        elif action == 5:
            body[at:at] = body[at : at + draw.choice([8, 64, 500])]
        else:
            body[at : at + size] = body[at : at + size][::-1]
    return bytes(body)


def damage_numbers(raw: bytes, draw: random.Random) -> bytes:
    """A run of bytes behind the header of a safetensors file: any scales, any codes, any floats, some not finite."""
    body, start = bytearray(raw), 8 + int.from_bytes(raw[:8], "little")
    for _ in range(draw.choice([1, 1, 3])):
        at, size = draw.randrange(start, len(body)), draw.choice([1, 2, 16, 64, 2000])
        fill = draw.choice([draw.randbytes(size), bytes([draw.randrange(256)]) * size, b"\0" * size, b"\xfe" * size])
        body[at : at + size] = fill[: len(body) - at]
    return bytes(body)


def damage(path: Path, raw: bytes, draw: random.Random) -> bytes:
    if path.suffix == ".json":
        return damage_json(raw, draw) if draw.random() < 0.75 else damage_bytes(raw, draw, len(raw))
    if path.suffix == ".safetensors":
        length = int.from_bytes(raw[:8], "little")
        if draw.random() < 0.25:
            return damage_numbers(raw, draw)
        if draw.random() < 0.3:
            return damage_bytes(raw, draw, 8 + length)
        header = damage_json(raw[8 : 8 + length], draw)
        said = draw.choice([len(header)] * 8 + [0, 2**63, length])
        return said.to_bytes(8, "little") + header + raw[8 + length :]
    return damage_bytes(raw, draw, draw.choice([200, 2000, 12_000, len(raw)]))


# ---- the loop ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_hang(seconds: int = HANG_SECONDS) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"not back after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problem_of(e: UsageError) -> str | None:
    """Why an error is not the one clear sentence it must be."""
    text = str(e)
    if not text.isprintable() or len(text) > 2000 or not text.endswith("."):
        return f"not one printable sentence: {text[:300]!r}"
    if e.exit_code != 2:
        return f"exit code {e.exit_code}"
    return None


def load_all(path: Path, *, inspected: bool = False) -> None:
    name = resolve_model(str(path))
    model = load_model(name, page_size=16)
    tokenizer_of(name).encode("the 1 2 thé")
    if inspected:
        inspect_model(str(path), gpu_named("H200")).as_dict()
        SingleSequence(model, 3).feed([1, 2, 3])  # any bits are numbers, or NaN; nothing but that may happen


def run(root: Path, seed: int, count: int) -> dict[str, Any]:
    folder, file = make_models(root)
    blocks, parts, wide = make_blocks(root), make_parts(root, file), make_wide(root, folder)
    targets = [*folder.glob("*.json"), *sorted(folder.glob("*.safetensors"))[:3], file, file, blocks, blocks]
    targets += [*parts, *sorted(wide.glob("*.safetensors"))[:3]]
    originals = {path: path.read_bytes() for path in targets}
    for path in (folder, file, blocks, parts[1], wide):
        load_all(path, inspected=True)  # whatever loading brings into memory once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = {"refused": 0, "loaded": 0}
    failures: list[dict[str, Any]] = []
    unforeseen: list[str] = []
    for case in range(count):
        draw = random.Random(f"{seed}/{case}")
        path = draw.choice(targets)
        path.write_bytes(damage(path, originals[path], draw))
        problem = None
        try:
            with no_hang():
                load_all(path if path.suffix == ".gguf" else path.parent, inspected=draw.random() < INSPECTED)
            counts["loaded"] += 1
        except UsageError as e:
            counts["refused"] += 1
            problem = problem_of(e)
            if e.__cause__ is not None and not isinstance(e.__cause__, HalfbyteError | OSError):
                unforeseen.append(f"{path.name}, case {case}: {e}")
        except BaseException:
            problem = traceback.format_exc()
        if problem is not None:
            failures.append({"case": case, "file": path.name, "problem": problem})
        path.write_bytes(originals[path])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    largest = max(len(raw) for raw in originals.values())
    return counts | {"failures": failures, "unforeseen": unforeseen, "grown": grown, "largest": largest}


if __name__ == "__main__":
    cache = Path(sys.argv[1]) / "cache"  # for scans of scales; compiled kernels are those of every other test
    cache.mkdir(parents=True)
    (cache / "cpu").symlink_to(cache_folder("cpu"))
    os.environ["HALFBYTE_CACHE_DIR"] = str(cache)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # panics of native code are told there; they come as exceptions, too
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
