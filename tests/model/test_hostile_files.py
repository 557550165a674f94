"""Files that lie: wrong weights, sizes without bound, pipes and devices, damage of every kind; and a fuzzer.

Each is one sentence that names the file, exit code 2, and nothing is allocated or waited for on a file's word. What a
configuration says about the network is held against transformers in test_config_parity.py; weights that are no numbers
are in test_nonfinite.py.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli import main
from halfbyte.errors import CapacityError, CheckpointError
from halfbyte.model import pattern_trial, plain_file
from halfbyte.model.load import load_model, resolve_model, tokenizer_of
from tests.model.file_mutator import load_all, make_models, no_hang, problem_of

MIB = 1 << 20
MUTATOR = Path(__file__).with_name("file_mutator.py")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("originals"))


@pytest.fixture
def folder(originals: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals[0], tmp_path / "model"))


@pytest.fixture
def file(originals: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(originals[1], tmp_path / "model.gguf"))


def refused(path: Path, *words: str) -> None:
    with no_hang(), pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert problem_of(caught.value) is None, problem_of(caught.value)
    assert not isinstance(caught.value.__cause__, Exception), "foreseen by none of the readers"
    for word in words:
        assert word in str(caught.value), str(caught.value)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_header(path: Path, change: Callable[[dict[str, Any]], str | None]) -> None:
    """The header of a safetensors file; `change` may return the JSON to write."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = (change(header) or json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def patch(file: Path, after: bytes, value: bytes) -> None:
    """Overwrite what follows `after`."""
    raw = bytearray(file.read_bytes())
    at = raw.index(after) + len(after)
    raw[at : at + len(value)] = value
    file.write_bytes(raw)


def test_the_models_are_whole(folder: Path, file: Path) -> None:
    load_all(folder)
    load_all(file)


# ---- wrong weights -------------------------------------------------------------------------------------------------


def test_fewer_layers_than_the_checkpoint_has(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(num_hidden_layers=1, layer_types=["sliding_attention"]))
    refused(folder, "model.layers.1.", "not part of a model with 1 layers", "19 such tensors")


@pytest.mark.parametrize(("count", "words"), [(1, "model with 1 blocks"), (3, "no tensor 'blk.2.")])
def test_a_changed_gguf_block_count(file: Path, count: int, words: str) -> None:
    patch(file, b"gpt-oss.block_count" + struct.pack("<I", 4), struct.pack("<I", count))
    refused(file, words)


def test_a_tensor_too_many(folder: Path) -> None:
    path = shard(folder)

    def add(header: dict[str, Any]) -> None:
        end = max(item["data_offsets"][1] for name, item in header.items() if name != "__metadata__")
        header["model.rotary_emb.scale"] = {"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]}

    edit_header(path, add)
    with path.open("ab") as f:
        f.write(bytes(8))
    refused(folder, path.name, "'model.rotary_emb.scale' is not part of a model")


def test_half_a_surrogate_pair_in_a_header(folder: Path) -> None:
    """JSON may hold one, and no text encoding does."""
    path = shard(folder)

    def spoil(header: dict[str, Any]) -> None:
        header[next(name for name in header if name != "__metadata__")]["shape"] = "\ud800"

    edit_header(path, spoil)
    refused(folder, path.name)


@pytest.mark.parametrize("top_k", [-1, 0, 5, 2**40])
def test_a_top_k_that_cannot_be(folder: Path, top_k: int) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(num_experts_per_tok=top_k, experts_per_token=top_k))
    refused(folder, "config.json", "top")


Offsets = Callable[[list[int]], list[Any]]
OFFSETS: dict[str, tuple[Offsets, str]] = {
    "overlapping": (lambda o: [o[0] - 2, o[1] - 2], "overlaps tensor"),
    "behind a gap": (lambda o: [o[0] + 2, o[1] + 2], "leaves a gap"),
    "negative": (lambda o: [-2, o[1] - o[0] - 2], "below zero"),
    "turned around": (lambda o: [o[1], o[0]], "below zero"),
    "fractional": (lambda o: [o[0] + 0.5, o[1] + 0.5], "data_offsets[0]: expected int"),
    "one": (lambda o: [o[0]], "data_offsets: expected array of length 2, got 1"),
    "as text": (lambda o: [str(o[0]), o[1]], "data_offsets[0]: expected int, got str"),
    "past the end": (lambda o: [o[0], o[1] + 2**40], "does not fit its own shape"),
    "beyond 64 bits": (lambda o: [o[0] + 2**70, o[1] + 2**70], "leaves a gap"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_that_cannot_be(folder: Path, name: str) -> None:
    change, words = OFFSETS[name]

    def move(header: dict[str, Any]) -> None:
        entry = header["model.layers.0.self_attn.k_proj.weight"]
        entry["data_offsets"] = change(entry["data_offsets"])

    edit_header(shard(folder), move)
    refused(folder, shard(folder).name, words)


def test_bytes_that_belong_to_no_tensor(folder: Path) -> None:
    with shard(folder).open("ab") as f:
        f.write(b"x" * 10)
    refused(folder, shard(folder).name, "10 bytes that belong to no tensor")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_a_key_given_twice(folder: Path, name: str) -> None:
    text = (folder / name).read_text().strip()
    key = text[text.index('"') : text.index(":")]
    (folder / name).write_text(text[:-1] + f", {key}: 3}}")
    refused(folder, name, "is there twice")


def test_a_tensor_given_twice(folder: Path) -> None:
    name = "model.layers.0.self_attn.sinks"
    edit_header(shard(folder), lambda h: json.dumps(h)[:-1] + f", {json.dumps(name)}: {json.dumps(h[name])}}}")
    refused(folder, shard(folder).name, f"{name}' is there twice")


def test_a_tensor_in_two_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    refused(folder, second.name, "is in model-00001", "too")


def test_a_gguf_tensor_or_key_given_twice(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    refused(file, "the tensor 'blk.0.attn_k.weight' twice")
    file.write_bytes(raw.replace(b"gpt-oss.attention.key_length", b"gpt-oss.rope.dimension_count"))
    refused(file, "the key 'gpt-oss.rope.dimension_count' twice")


def test_overlapping_gguf_tensors(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    name = b"blk.1.attn_k.weight"
    at = raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", raw, at)
    raw[at : at + 8] = struct.pack("<Q", offset - 32)
    file.write_bytes(raw)
    refused(file, "overlaps tensor")


@pytest.mark.parametrize(
    "key", ["rope.scaling.attn_factor", "attn_logit_softcapping", "rope.scaling.yarn_log_multiplier"]
)
def test_a_gguf_key_that_changes_the_network(originals: tuple[Path, Path], tmp_path: Path, key: str) -> None:
    """Put in front of the other metadata."""
    raw = originals[1].read_bytes()
    name = f"gpt-oss.{key}".encode()
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<If", 6, 0.5)
    padding = -(len(entry) + 29) % 32  # what follows stays where its alignment wants it
    entry += struct.pack("<Q", 5) + b"x.pad" + struct.pack("<IIQ", 9, 0, padding) + bytes(padding)
    (tensors, keys) = struct.unpack_from("<QQ", raw, 8)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:8] + struct.pack("<QQ", tensors, keys + 2) + entry + raw[24:])
    refused(path, f"gpt-oss.{key} '0.5' makes it another network")


# ---- without bound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**9, 2**32, 10**18, 1025])
def test_layers_without_bound(folder: Path, value: int) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(num_hidden_layers=value, layer_types=None))
    refused(folder, "config.json", f"layers is {value}, more than 1024")


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_local_experts", "vocab_size", "head_dim"])
def test_sizes_without_bound(folder: Path, key: str) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update({key: 10**15}))
    refused(folder, "config.json")


def test_a_context_without_bound(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(max_position_embeddings=10**12))
    refused(folder, "max_context is 1000000000000")


@pytest.mark.parametrize("count", [2**32 - 1, 1_000_000])
def test_gguf_blocks_without_bound(file: Path, count: int) -> None:
    patch(file, b"gpt-oss.block_count" + struct.pack("<I", 4), struct.pack("<I", count))
    refused(file, f"layers is {count}, more than 1024")


GGUF_COUNTS: dict[str, tuple[bytes, bytes, str]] = {
    "tensors": (b"GGUF\3\0\0\0", struct.pack("<Q", 2**63), "tensors"),
    "keys": (b"GGUF\3\0\0\0", struct.pack("<QQ", 30, 2**62), "metadata keys"),
    "a key's length": (b"GGUF\3\0\0\0", struct.pack("<QQQ", 30, 30, 2**62), "is truncated"),
    "a string's length": (b"general.name" + struct.pack("<I", 8), struct.pack("<Q", 2**40), "is truncated"),
    "an array": (b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8), struct.pack("<Q", 2**60), "is truncated"),
    "numbers": (b"tokenizer.ggml.token_type" + struct.pack("<II", 9, 5), struct.pack("<Q", 2**60), "is truncated"),
    "a type": (b"general.name", struct.pack("<I", 77), "'general.name' has a type 77"),
    "an array of arrays": (b"tokenizer.ggml.tokens" + struct.pack("<I", 9), struct.pack("<I", 9), "has a type 9"),
    "dimensions": (b"blk.1.attn_k.weight", struct.pack("<I", 2**31), "2147483648 dimensions"),
    "a dimension": (b"blk.1.attn_k.weight" + struct.pack("<I", 2), struct.pack("<Q", 2**60), "is truncated"),
}


@pytest.mark.parametrize("name", GGUF_COUNTS)
def test_gguf_counts_without_bound(file: Path, name: str) -> None:
    after, value, words = GGUF_COUNTS[name]
    patch(file, after, value)
    refused(file, "model.gguf", words)


@pytest.mark.parametrize("id", [10**10, 2**31, -1, 70_000 + 4 * 261])
def test_token_ids_without_bound(folder: Path, id: int) -> None:
    edit_json(folder / "tokenizer.json", lambda raw: raw["model"]["vocab"].update(the=id))
    refused(folder, "tokenizer.json", f"has the id {id} among 261 tokens")


def test_two_tokens_with_one_id(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", lambda raw: raw["model"]["vocab"].update(the=256))
    refused(folder, "gives the id 256 to 'th' and to 'the'")


def test_a_pattern_without_bound(folder: Path) -> None:
    def nest(raw: dict[str, Any]) -> None:
        raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(((a{999}){999}){999})"

    edit_json(folder / "tokenizer.json", nest)
    refused(folder, "tokenizer.json: pre_tokenizer repeats its pattern")


def set_pattern(folder: Path, pattern: str) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern

    edit_json(folder / "tokenizer.json", change)


@pytest.mark.parametrize("pattern", [r"(a+)+$|.", r"(\w+\s?)+$|\s", "(q+q+)+y|.", "(a"])
def test_a_pattern_that_backtracks(folder: Path, pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    set_pattern(folder, pattern)
    refused(folder, "tokenizer.json", repr(pattern))
    assert "panicked" not in capfd.readouterr().err


def test_a_pattern_that_takes_long(folder: Path) -> None:
    """Each match stays below the engine's limit, and there is one match for every character."""
    set_pattern(folder, r"\w*\w*#|.")
    refused(folder, "tokenizer.json", f"more than {pattern_trial.CPU_SECONDS} s")


def test_an_own_pattern_that_does_not_backtrack(folder: Path) -> None:
    set_pattern(folder, r"\p{L}+|\p{N}{1,2}|\s+|.")
    tokenizer = tokenizer_of(resolve_model(str(folder)))
    assert tokenizer.decode(tokenizer.encode("the text 123")) == "the text 123"


def test_a_panic_at_a_later_text_is_a_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pattern(folder, r"(a+)+$|.")
    monkeypatch.setattr("halfbyte.model.tokenizer.try_patterns", lambda *_, **__: None)
    tokenizer = tokenizer_of(resolve_model(str(folder)))
    for allow_special in (False, True):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
            tokenizer.encode("a" * 40 + "b", allow_special=allow_special)
        assert problem_of(caught.value) is None


def test_a_trial_that_something_else_ended_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_pattern(folder, r"\w+|.")
    ended = subprocess.CompletedProcess([], -signal.SIGKILL, b"", b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(CapacityError):
        tokenizer_of(resolve_model(str(folder)))


@pytest.mark.parametrize("model", [{"dropout": 0.5}, {"type": "Unigram"}])
def test_a_tokenizer_of_another_kind(folder: Path, model: dict[str, Any]) -> None:
    edit_json(folder / "tokenizer.json", lambda raw: raw["model"].update(model))
    refused(folder, "tokenizer.json")


def test_a_tokenizer_that_cuts_or_pads_does_not(folder: Path) -> None:
    before = tokenizer_of(resolve_model(str(folder))).encode("the text " * 9)
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    pad["pad_to_multiple_of"] = None
    edit_json(folder / "tokenizer.json", lambda raw: raw.update(truncation=cut, padding=pad))
    assert tokenizer_of(resolve_model(str(folder))).encode("the text " * 9) == before


BOMBS = {
    "lists": b"[" + b"[]," * (MIB // 3) + b"[]]",
    "objects": b"[" + b"{}," * (MIB // 3) + b"{}]",
    "nesting": b"[" * 500_000,
    "nested objects": b'{"a":' * 200_000,
    "digits": b'{"model_type": "gpt_oss", "vocab_size": ' + b"9" * 900_000 + b"}",
    "nothing": b"",
    "zeros": bytes(100_000),
    "not text": b'{"model_type": "\xff\xfe"}',
}
JSON_FILES = ["config.json", "model.safetensors.index.json", "tokenizer.json"]


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_explodes(folder: Path, name: str, bomb: str) -> None:
    (folder / name).write_bytes(BOMBS[bomb])
    refused(folder, name)


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_is_too_large(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as f:
        f.truncate(1 << 40)  # a hole: no disk is used
    refused(folder, name, "1099511627776 bytes, but such a file has at most")


def test_a_header_that_is_too_large(folder: Path) -> None:
    with shard(folder).open("r+b") as f:
        f.write((9 * MIB).to_bytes(8, "little"))
        f.truncate(1 << 40)
    refused(folder, shard(folder).name, "its header has 9437184 bytes")


@pytest.mark.parametrize("name", [*JSON_FILES, "model-00001-of-00003.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "zero", "random", "folder", "gone", "loop"])
def test_something_else_than_a_file(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "gone":
        path.symlink_to({"zero": "/dev/zero", "random": "/dev/urandom"}[kind])
    refused(
        folder, name if name != "model.safetensors.index.json" or kind not in ("gone", "loop") else "model.safetensors"
    )


def test_a_pipe_for_a_gguf(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "is a pipe, not a file")
    with pytest.raises(CheckpointError, match="neither a model folder nor"):
        tokenizer_of(resolve_model(str(tmp_path / "model.gguf")))


# ---- the command ---------------------------------------------------------------------------------------------------


def test_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root nothing is forbidden, so the call fails by hand."""
    real = os.open
    for name in (*JSON_FILES, shard(folder).name):

        def forbid(path: Any, *args: Any, name: str = name, **kwargs: Any) -> int:
            if Path(path).name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(plain_file.os, "open", forbid)
        refused(folder, name, "Permission denied")


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/proc/self/mem", "~nobody-of-this-name/x"])
def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(resolve_model(path))
    assert len(str(caught.value)) < 6000
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "command", [["generate", "-p", "x"], ["explain"], ["serve"], ["quantize", "OUT", "--layers", "qkv=q8"]]
)
@pytest.mark.parametrize(
    ("name", "body"),
    [("config.json", b"[1]"), ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}')],
)
def test_the_command_says_one_sentence(
    folder: Path, name: str, body: bytes, command: list[str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (folder / name).write_bytes(body)
    verb, *rest = command
    arguments = [str(folder), *(str(folder.parent / "out") if a == "OUT" else a for a in rest)]
    monkeypatch.setattr(sys, "argv", ["halfbyte", verb, *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 2
    assert said[-1].startswith("halfbyte: ")
    assert name in said[-1]
    assert not any("Traceback" in line for line in said)


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["run", "x"], ["chat"], ["serve"], ["eval"]])
def test_a_backtracking_pattern_ends_a_command_with_one_sentence(
    folder: Path, command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pattern(folder, r"(a+)+$|.")
    verb, *rest = command
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # `run` reads what is piped in
    monkeypatch.setattr(sys, "argv", ["halfbyte", verb, str(folder), *rest])
    with pytest.raises(SystemExit) as caught:
        main()
    lines = capfd.readouterr().err.strip().splitlines()
    assert caught.value.code == 2
    assert lines[-1].startswith("halfbyte: ")
    assert "tokenizer.json" in lines[-1]
    assert not any("Traceback" in line or "panicked" in line for line in lines)


def test_whatever_a_reader_raises_is_one_sentence(tmp_path: Path) -> None:
    class PanicException(BaseException):
        pass

    for error in (
        KeyError("a\nb"),
        RecursionError("deep"),
        MemoryError(),
        PanicException("thread panicked"),
        OSError(5, "I/O"),
    ):
        with pytest.raises(CheckpointError) as caught, plain_file.refusing(tmp_path / "model"):
            raise error
        assert problem_of(caught.value) is None
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(KeyboardInterrupt), plain_file.refusing(tmp_path):
        raise KeyboardInterrupt


# ---- the fuzzer ----------------------------------------------------------------------------------------------------


def fuzz(folder: Path, seed: int, count: int, seconds: int) -> None:
    command = [sys.executable, str(MUTATOR), str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["failures"], result["failures"][:3]
    assert not result["unforeseen"], result["unforeseen"][:3]
    assert result["refused"] + result["loaded"] == count
    assert result["refused"] > count // 2
    assert result["loaded"] > count // 50, "everything is refused"
    assert result["grown"] <= 2 * result["largest"] + 64 * MIB, f"{result['grown'] / MIB:.0f} MiB"


def test_five_hundred_damaged_models(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=14, count=500, seconds=900)


@pytest.mark.slow
def test_twenty_thousand_damaged_models(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=15, count=20_000, seconds=7200)
