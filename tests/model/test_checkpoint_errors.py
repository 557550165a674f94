"""Damaged, incomplete and foreign models: one clear sentence each, exit code 2, and nothing half-written is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.errors import CheckpointError
from halfbyte.model import checkpoint, synthetic, weight_file
from halfbyte.model.config import NAMED

CONFIG = NAMED["small"].with_(layers=2, layer_kinds=(), pad_token=2)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    synthetic.write_safetensors(CONFIG, 1, root / "sharded", max_shard_bytes=2_000_000)
    synthetic.write_safetensors(CONFIG, 1, root / "single")
    synthetic.write_gguf(CONFIG, 1, root / "model.gguf")
    return root


@pytest.fixture
def sharded(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "sharded", tmp_path / "model"))


@pytest.fixture
def single(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "single", tmp_path / "model"))


@pytest.fixture
def file(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(originals / "model.gguf", tmp_path / "model.gguf"))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert message.endswith(".")
    for word in words:
        assert word in message, message


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the single file of a folder with safetensors' own library."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_truncated_shard(sharded: Path) -> None:
    last = shards(sharded)[-1]
    with last.open("r+b") as f:
        f.truncate(last.stat().st_size - 1)
    refused(sharded, last.name, "truncated", "fetch it again")


@pytest.mark.parametrize("keep", [0, 5, 100])
def test_a_shard_cut_inside_its_header(sharded: Path, keep: int) -> None:
    first = shards(sharded)[0]
    with first.open("r+b") as f:
        f.truncate(keep)
    refused(sharded, first.name, "truncated")


def test_a_shard_that_is_something_else(sharded: Path) -> None:
    first = shards(sharded)[0]
    size = first.stat().st_size
    first.write_bytes(struct.pack("<Q", 64) + b"<html>" + b" " * (size - 14))
    refused(sharded, first.name, "not a safetensors file")
    first.write_bytes(b"<!DOCTYPE html>" * 100)
    refused(sharded, first.name, "not a safetensors file")


def test_a_git_lfs_pointer_instead_of_a_shard(sharded: Path) -> None:
    shards(sharded)[0].write_text(POINTER)
    refused(sharded, shards(sharded)[0].name, "Git LFS pointer", "git lfs pull")


def test_an_index_naming_an_absent_file(sharded: Path) -> None:
    gone = shards(sharded)[1]
    gone.unlink()
    refused(sharded, gone.name, "is not there")


def test_an_index_that_lies_about_a_tensor(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["lm_head.weight"] = shards(sharded)[0].name
    index.write_text(json.dumps(raw))
    refused(sharded, "lm_head.weight", "but it is not")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_unreadable_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, "index.json", "cannot be read")


def test_an_index_pointing_outside_its_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["lm_head.weight"] = "../other.safetensors"
    index.write_text(json.dumps(raw))
    refused(sharded, "../other.safetensors", "not a file of its own folder")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.sinks",
        "model.layers.0.mlp.experts.down_proj_scales",
        "model.layers.1.self_attn.k_proj.bias",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor(single: Path, name: str) -> None:
    edit(single, lambda tensors: tensors.pop(name))
    refused(single, f"no tensor {name!r}")


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.int8, "I8"),
        ("model.layers.0.mlp.experts.down_proj_blocks", torch.int8, "I8"),
        ("model.norm.weight", torch.float64, "F64"),
        ("model.layers.1.mlp.experts.gate_up_proj_scales", torch.bfloat16, "BF16"),
    ],
)
def test_a_wrong_dtype(single: Path, name: str, dtype: torch.dtype, said: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    edit(single, change)
    refused(single, name, f"dtype {said!r}, but gpt-oss needs")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.experts.gate_up_proj_blocks",
        "model.embed_tokens.weight",
    ],
)
def test_a_wrong_shape(single: Path, name: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1]

    edit(single, change)
    refused(single, name, "shape", "but config.json asks for")


def test_another_architecture(single: Path) -> None:
    raw = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    refused(single, "model_type is 'llama'", "gpt_oss models only")


def test_not_a_model_at_all(tmp_path: Path, single: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json does not exist")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "not a GGUF file")
    (tmp_path / "nothing.gguf").write_text("")
    refused(tmp_path / "nothing.gguf", "not a GGUF file")
    refused(single / "model.safetensors", "give the folder")
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "does not unpickle")
    (single / "pytorch_model.bin").unlink()
    refused(single, "neither model.safetensors nor")


# ---- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_gguf(file: Path, share: float) -> None:
    with file.open("r+b") as f:
        f.truncate(int(file.stat().st_size * share))
    refused(file, "model.gguf", "truncated")


def test_a_git_lfs_pointer_instead_of_a_gguf(file: Path) -> None:
    file.write_text(POINTER)
    refused(file, "Git LFS pointer")


def patched(file: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    raw = file.read_bytes()
    assert old in raw
    file.write_bytes(raw.replace(old, new))


def test_a_gguf_of_another_architecture(tmp_path: Path) -> None:
    for arch, words in (("llama", ["'llama'", "gpt-oss models only"]), ("gptoss", ["Ollama"])):
        path = tmp_path / f"{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(2)
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refused(path, *words)


def test_a_gguf_without_a_key(file: Path) -> None:
    patched(file, b"gpt-oss.attention.sliding_window", b"gpt-oss.attention.sliding_windoW")
    refused(file, "gpt-oss.attention.sliding_window")


def test_a_gguf_without_a_tensor(file: Path) -> None:
    patched(file, b"blk.1.attn_sinks.weight", b"blk.1.attn_sinkz.weight")
    refused(file, "no tensor 'blk.1.attn_sinks.weight'")


def gguf_info(file: Path, name: str) -> int:
    """Where the dims of a tensor's entry start."""
    raw = file.read_bytes()
    return raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("blk.0.attn_q.weight", 34, "type TQ1_0, but halfbyte reads it as F32, F16, BF16, Q8_0, MXFP4, Q4_0"),
        ("blk.0.attn_norm.weight", 1, ""),
        ("blk.0.attn_norm.weight", 8, "type Q8_0, but halfbyte reads it as F32, F16, BF16;"),
        ("blk.0.attn_q.weight", 250, "type number 250"),
    ],
)
def test_a_gguf_type(file: Path, name: str, kind: int, words: str) -> None:
    raw = bytearray(file.read_bytes())
    dims = 1 if name.endswith("norm.weight") else 2
    at = gguf_info(file, name) + 8 * dims
    raw[at : at + 4] = struct.pack("<I", kind)
    file.write_bytes(raw)
    if words:
        refused(file, name, words)
    else:
        checkpoint.read_config(file)


def test_a_gguf_shape(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    at = gguf_info(file, "blk.0.attn_k.weight") + 8
    raw[at : at + 8] = struct.pack("<Q", 3)
    file.write_bytes(raw)
    refused(file, "blk.0.attn_k.weight", "shape [3, 256], but its metadata asks for [64, 256]")


def test_a_gguf_of_another_version(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[4:8] = struct.pack(">I", 3)
    file.write_bytes(raw)
    refused(file, "GGUF version 50331648")


def test_a_folder_of_gguf_files(file: Path) -> None:
    assert checkpoint.read_config(file.parent) == checkpoint.read_config(file)  # there is only one
    shutil.copy(file, file.with_name("other.gguf"))
    refused(file.parent, "folder of GGUF files", "model.gguf")


# ---- writing -------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda root: synthetic.write_safetensors(CONFIG, 1, root / "out", max_shard_bytes=2_000_000),
    "gguf": lambda root: synthetic.write_gguf(CONFIG, 1, root / "out.gguf"),
    "nested": lambda root: synthetic.write_gguf(CONFIG, 1, root / "a" / "b" / "out.gguf"),
}


@pytest.fixture(params=WRITES)
def write(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    return WRITES[request.param]


@pytest.mark.parametrize("after", [0, 3, 30])
def test_a_disk_that_fills_while_writing(
    write: Callable[[Path], Any], after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = weight_file.write_tensor, 0

    def full(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    for module in ("safetensors_writer", "gguf_writer"):
        monkeypatch.setattr(f"halfbyte.model.{module}.write_tensor", full)
    with pytest.raises(CheckpointError, match=r"no space left for .*nothing was kept") as caught:
        write(tmp_path)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_really_full_disk(write: Callable[[Path], Any], tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"no space left .*needed, 0\.00 GB free"):  # seen before it starts
        write(tiny_disk)
    assert list(tiny_disk.iterdir()) == []
    honest = shutil.disk_usage
    monkeypatch.setattr(weight_file.shutil, "disk_usage", lambda p: honest("/"))
    with pytest.raises(CheckpointError, match="no space left"):  # seen by the write that fails
        write(tiny_disk)
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_an_interrupted_write_leaves_nothing(
    write: Callable[[Path], Any], failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any) -> None:
        raise failure

    for module in ("safetensors_writer", "gguf_writer"):
        monkeypatch.setattr(f"halfbyte.model.{module}.write_tensor", stop)
    with pytest.raises(type(failure)):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced(write: Callable[[Path], Any], tmp_path: Path) -> None:
    write(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="already exists; remove it or choose another name"):
        write(tmp_path)
    assert sorted(p for p in tmp_path.rglob("*")) == before
    assert not [p for p in before if ".partial" in p.name]


def test_a_source_that_breaks_midway_leaves_no_target(sharded: Path, tmp_path: Path) -> None:
    """The header check passes, the bytes vanish while they are read."""
    with pytest.MonkeyPatch.context() as patch:
        real = weight_file.WeightFile.read

        def read(self: weight_file.WeightFile, offset: int, dest: torch.Tensor) -> torch.Tensor:
            if dest.numel() > 100_000:
                os.truncate(self.path, offset + 10)
            return real(self, offset, dest)

        patch.setattr(weight_file.WeightFile, "read", read)
        with pytest.raises(CheckpointError, match="is truncated"):
            checkpoint.quantize_checkpoint(sharded, tmp_path / "out", {"qkv": "q8"})
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if ".partial" in p.name]


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        synthetic.write_gguf(CONFIG, 1, tmp_path / "file" / "out.gguf")
