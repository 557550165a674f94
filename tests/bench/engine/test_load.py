"""The measurement of a start writes the checkpoint that the slow writer would, and scales honestly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.engine import load
from halfbyte.formats.tensor import MXTensor
from halfbyte.lab import receipts
from halfbyte.model import checkpoint, synthetic
from halfbyte.model import load as load_
from halfbyte.model.config import NAMED


def test_the_fast_writer_writes_the_same_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PIECE", 40960)
    monkeypatch.setattr(load, "SHARD", 3_000_000)
    config = NAMED["small"]
    load.write(config, tmp_path / "fast", config.layers, device="cpu")
    assert len(list((tmp_path / "fast").glob("*.safetensors"))) > 1
    ours, theirs = checkpoint.load(tmp_path / "fast"), synthetic.make(config, 0)
    for (layer, role, a), (_, _, b) in zip(ours.items(), theirs.items()):
        if isinstance(a, MXTensor) and isinstance(b, MXTensor):
            assert torch.equal(a.data, b.data), (layer, role)
            assert torch.equal(a.scales, b.scales), (layer, role)
        else:
            assert isinstance(a, torch.Tensor), (layer, role)
            assert torch.equal(a, b), (layer, role)


@pytest.mark.parametrize("written", [2, 4])
def test_layers_that_are_not_written_are_holes(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a place of its own, as the loader asks; they take no room and read as zeros."""
    monkeypatch.setattr(load, "SHARD", 1_000_000)
    config = NAMED["small"]
    load.write(config, tmp_path / "some", written, device="cpu")
    files = list((tmp_path / "some").glob("*.safetensors"))
    assert sum(p.stat().st_size for p in files) > load.checkpoint_bytes(config)
    if written < config.layers:
        assert sum(512 * p.stat().st_blocks for p in files) < 0.8 * load.checkpoint_bytes(config)
    model = load_.load_model(load_.resolve_model(str(tmp_path / "some")), allow_nan=True)
    assert load.equal(model, written, device="cpu")
    for layer in {0, config.layers - 1}:
        down = model.weights.layers[layer].down
        assert isinstance(down, MXTensor)
        down.data.view(-1)[0] ^= 1
        assert not load.equal(model, written, device="cpu"), layer
        down.data.view(-1)[0] ^= 1
    assert load.equal(model, written, device="cpu")


def test_bytes_of_the_true_shapes() -> None:
    assert load.checkpoint_bytes(load.config_of("120b", 36)) / 1e9 == pytest.approx(65.2, abs=0.1)
    assert load.checkpoint_bytes(load.config_of("120b", 4)) / 1e9 == pytest.approx(9.3, abs=0.1)
    assert load.checkpoint_bytes(load.config_of("20b", 24)) / 1e9 == pytest.approx(13.8, abs=0.1)


def test_only_the_weights_scale_with_layers() -> None:
    row = {"ready_s": 20.0, "weights_s": 8.0}
    assert load.scaled(row, 18, 36) == 28.0
    assert load.scaled(row, 36, 36) == 20.0


def test_the_receipt_names_files_that_exist() -> None:
    assert set(receipts.hashes(receipts.PACKAGE / name for name in load.LOADING)) == set(load.LOADING)
