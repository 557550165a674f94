"""The copy in bf16 has the very numbers of the model that it was made from, and is a plain folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halfbyte import formats
from halfbyte.formats.tensor import MXTensor
from halfbyte.lab.peers.bf16_copy import bf16_copy, write_bf16
from halfbyte.model import checkpoint, load
from halfbyte.model.weights import roles


@pytest.mark.exact
def test_every_matrix_has_the_same_numbers(tmp_path: Path) -> None:
    write_bf16(load.EMBEDDED, tmp_path / "copy")
    before, after = checkpoint.open_model(load.EMBEDDED), checkpoint.open_model(tmp_path / "copy")
    for layer, role in roles(before.config):
        assert set(after.formats(layer, role)) <= {"bf16", "f32"}
        for old, new in zip(before.parts(layer, role), after.parts(layer, role), strict=True):
            numbers = formats.dequantize(old, torch.float32) if isinstance(old, MXTensor) else old.float()
            assert isinstance(new, torch.Tensor)
            assert torch.equal(new.float(), numbers), (layer, role)
    before.close()
    after.close()
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (load.EMBEDDED / "tokenizer.json").read_bytes()


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    first = bf16_copy(load.EMBEDDED)
    when = (first / "config.json").stat().st_mtime_ns
    assert bf16_copy(load.EMBEDDED) == first
    assert (first / "config.json").stat().st_mtime_ns == when
