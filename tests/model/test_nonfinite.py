"""Weights that are no numbers, and matrices of zeros, are named while a model is loaded, with file and tensor."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.tensor import MXTensor
from halfbyte.kernels.cpu.library import open_library
from halfbyte.kernels.cpu.packing import packer_of
from halfbyte.model import checkpoint, synthetic, weight_file
from halfbyte.model.config import NAMED

CONFIG = NAMED["small"].with_(layers=2, layer_kinds=(), pad_token=2)
ROWS16 = dict.fromkeys(("qkv", "o", "gate_up", "down", "lm_head"), "rows16")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    synthetic.write_safetensors(CONFIG, 1, root / "folder")
    synthetic.write_gguf(CONFIG, 1, root / "model.gguf")
    return root


@pytest.fixture
def folder(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "folder", tmp_path / "model"))


def put(folder: Path, name: str, values: list[float]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-len(values) :] = torch.tensor(values).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model.layers.1.mlp.experts.down_proj_scales", [255.0]),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", [255.0, 254.0, 255.0]),
        ("model.embed_tokens.weight", [NAN]),
        ("lm_head.weight", [INF, 1.0, -INF, NAN]),
        ("model.layers.0.self_attn.k_proj.weight", [-INF]),
        ("model.layers.1.self_attn.sinks", [NAN]),
        ("model.norm.weight", [INF]),
    ],
)
def test_a_weight_that_is_no_number(
    folder: Path, name: str, values: list[float], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    put(folder, name, values)
    count = sum(v == 255.0 or v != v or abs(v) == INF for v in values)
    said = rf"model\.safetensors: tensor '{name}' has {count} values? that"
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint.load(folder)
    assert "--allow-nan" in str(caught.value)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.quantize_checkpoint(folder, tmp_path / "out", {"qkv": "q8"})
    assert not (tmp_path / "out").exists()
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        weights = checkpoint.load(folder, allow_nan=True)
    assert f"tensor '{name}' has {count} value" in caplog.text
    down = weights.layers[1].down
    assert isinstance(down, MXTensor)
    assert (int(down.scales.max()) == 255) == ("down" in name), "the value stays what it was"


def test_the_largest_numbers_are_numbers(folder: Path) -> None:
    put(folder, "model.layers.1.mlp.experts.down_proj_scales", [254.0, 0.0])
    largest = torch.finfo(torch.bfloat16).max
    put(folder, "lm_head.weight", [largest, -largest] * 64)  # sums overflow
    checkpoint.load(folder)


def test_many_are_counted_and_the_rest_is_mentioned(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "layernorm" in name or "bias" in name:
            tensors[name].fill_(NAN)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' has 256 values .* further weights") as caught:
        checkpoint.load(folder)
    assert "\n" not in str(caught.value)


def test_a_gguf_with_a_nan(originals: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(originals / "model.gguf", tmp_path / "model.gguf"))
    for name in ("blk.1.ffn_up_exps.weight", "blk.0.attn_output.bias"):
        tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
        body = bytearray(path.read_bytes())
        value = b"\xff" if "exps" in name else b"\0\0\xc0\x7f"  # the scale of the first block; a NaN in float32
        body[tensor.data_offset : tensor.data_offset + len(value)] = value
        path.write_bytes(body)
        with pytest.raises(CheckpointError, match=rf"model\.gguf: tensor .*'{name}' has 1 value that"):
            checkpoint.load(path)
        shutil.copy(originals / "model.gguf", path)


# ---- zeros ---------------------------------------------------------------------------------------------------------


def change(folder: Path, values: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    values(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.embed_tokens.weight", ""),
        ("lm_head.weight", ""),
        ("model.norm.weight", ""),
        ("model.layers.1.input_layernorm.weight", ""),
        ("model.layers.0.self_attn.v_proj.weight", ""),
        ("model.layers.1.self_attn.o_proj.weight", ""),
        ("model.layers.0.mlp.router.weight", ""),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", ""),
        ("model.layers.1.mlp.experts.down_proj_blocks", "model.layers.1.mlp.experts.down_proj_scales"),
    ],
)
def test_a_matrix_of_zeros(
    folder: Path, name: str, label: str, packed: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    change(folder, lambda tensors: tensors[name].zero_())
    options: dict[str, Any] = {"layouts": ROWS16, "packer": packer_of(open_library(), 2)} if packed else {}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{label or name}' .*zeros") as caught:
        checkpoint.load(folder, **options)
    assert "--allow-nan" in str(caught.value)
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        checkpoint.load(folder, allow_nan=True, **options)
    assert f"tensor '{label or name}'" in caplog.text


@pytest.mark.parametrize("packed", [False, True])
def test_zeros_that_a_model_may_have(folder: Path, packed: bool) -> None:
    """Biases, sinks, single experts, rows of the vocabulary."""

    def zero(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("bias", "sinks")):
                tensor.zero_()
            elif "experts" in name:
                tensor[1:].zero_()
            elif name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
                tensor[:-1].zero_()

    change(folder, zero)
    options: dict[str, Any] = {"layouts": ROWS16, "packer": packer_of(open_library(), 2)} if packed else {}
    checkpoint.load(folder, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gguf_whose_gates_are_zeros(originals: Path, tmp_path: Path, packed: bool) -> None:
    path = Path(shutil.copy(originals / "model.gguf", tmp_path / "model.gguf"))
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_gate_exps.weight")
    body = bytearray(path.read_bytes())
    body[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = bytes(tensor.n_bytes)
    path.write_bytes(body)
    options: dict[str, Any] = {"layouts": ROWS16, "packer": packer_of(open_library(), 2)} if packed else {}
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'blk.1.ffn_gate_exps.weight'.*zeros.*gate"):
        checkpoint.load(path, **options)


def test_a_shard_that_ends_with_zeros(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No matrix is all zeros, but the last part of the file never arrived."""
    path = folder / "model.safetensors"
    size, missing = path.stat().st_size, 100_000
    os.truncate(path, size - missing)
    os.truncate(path, size)
    monkeypatch.setattr(weight_file, "ZERO_TAIL", missing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends with .* zeros.*--allow-nan"):
        checkpoint.load(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends with .* zeros"):
        checkpoint.quantize_checkpoint(folder, tmp_path / "out", {"qkv": "q8"})


@pytest.mark.parametrize(
    ("name", "kept", "cut"),
    [
        ("model.layers.1.self_attn.q_proj.weight", 0.5, True),
        ("model.layers.1.mlp.experts.gate_up_proj_blocks", 0.7, True),  # within an expert
        ("model.layers.1.mlp.experts.gate_up_proj_blocks", 0.5, False),  # experts of zeros
        ("model.layers.1.mlp.experts.gate_up_proj_bias", 0.3, False),
        ("lm_head.weight", 0.5, False),  # rows of the vocabulary
    ],
)
def test_a_file_that_ends_within_a_matrix_is_cut(folder: Path, name: str, kept: float, cut: bool) -> None:
    """However little is missing: the last tensor of the file is whole up to here, and zeros follow."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = tensors.pop(name).clone()
    last.view(-1)[int(kept * last.numel()) :] = 0
    header: dict[str, Any] = {}
    data = b""
    for key, tensor in [*tensors.items(), (name, last)]:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        kind = {torch.bfloat16: "BF16", torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
        header[key] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = checkpoint.open_model(folder).reading.zero_tails
    assert (path in found) == cut
    if cut:
        with pytest.raises(CheckpointError, match=r"model\.safetensors ends with [0-9]+ KiB of zeros.*--allow-nan"):
            checkpoint.load(folder)
