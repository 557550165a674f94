"""The scan of MXFP4 scale codes, against codes that are planted in a checkpoint and counted by hand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.variants import DOWN, GATE_UP, Checkpoint
from halfbyte import formats
from halfbyte.errors import CheckpointError
from halfbyte.model import scales
from halfbyte.model.checkpoint import load, open_model, save_gguf
from halfbyte.model.load import EMBEDDED
from halfbyte.model.scales import TensorScales, scan_model, scan_scales, summarise


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / scales.KIND


def planted(folder: Path) -> Path:
    """Layer 0's down: two zero groups, a NaN, one group 20 octaves down, one loud row; layer 1's gate_up: a loud group
    of columns."""
    model = Checkpoint.read(EMBEDDED)
    first, second = (layer for i, layer in enumerate(model.layers()) if i < 2)
    codes, blocks = first[f"{DOWN}_scales"], first[f"{DOWN}_blocks"]
    largest = int(codes.max())
    codes[3, 7] = largest + 5
    codes[3, 7, 1] = largest - 16  # 21 octaves under 2^(largest + 5)
    codes[0, 0, :2], blocks[0, 0, :2] = 0, 0
    codes[2, 2, 2] = 255
    blocks[5, 5, 0] = 0x08  # zeros, some negative, under an ordinary code
    second[f"{GATE_UP}_scales"][:, :, 4] = 140
    return model.write(folder, EMBEDDED)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[scales.FileSource]:
    with contextlib.closing(open_model(path)) as source:
        yield source


def scanned(path: Path) -> dict[tuple[int | None, str], TensorScales]:
    with opened(path) as source:
        return {(t.layer, t.role): t for t in scan_scales(source)}


def test_every_number_is_what_counting_by_hand_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "PIECE", 1000)  # many pieces
    folder = planted(tmp_path / "m")
    codes = {n: t.numpy().astype(int) for n, t in Checkpoint.read(folder).tensors.items() if n.endswith("_scales")}
    found = scanned(folder)
    assert len(found) == len(codes) == 16
    for (layer, role), t in found.items():
        expected = codes[f"model.layers.{layer}.mlp.experts.{role}_proj_scales"]
        assert list(t.counts) == np.bincount(expected.ravel(), minlength=256).tolist()
        real = np.where((expected == 0) | (expected == 255), -1, expected)
        ends = [(max(r[r >= 0]), min(r[r >= 0])) for r in real.reshape(-1, real.shape[-1]) if (r >= 0).any()]
        assert (t.largest, t.smallest) == (max(e[0] for e in ends), min(e[1] for e in ends))
        assert t.row_spread == max(high - low for high, low in ends)
        assert t.far == ((real >= 0) & (real < t.largest - 17)).sum()
        assert t.zero_groups is None
    down, gate_up = found[0, "down"], found[1, "gate_up"]
    assert (down.zero_codes, down.nan_codes, down.far, down.loud_rows, down.row_spread) == (2, 1, 1, 1, 21)
    assert (gate_up.largest, gate_up.loud_columns) == (140, 1)
    assert found[2, "down"].loud_rows == found[2, "down"].far == 0


def test_summaries_add_up(tmp_path: Path) -> None:
    with opened(planted(tmp_path / "m")) as source:
        by_role = {s.role: s for s in summarise(scan_scales(source))}
    down = by_role["down"]
    assert (down.tensors, down.zero_codes, down.far, down.far_tensors, down.largest_layer) == (8, 2, 1, 1, 0)
    assert down.zero_share == 2 / down.groups
    assert by_role["gate_up"].largest == 140
    assert down.bulk <= 5


def test_a_gguf_has_the_same_codes_and_its_zero_groups(tmp_path: Path) -> None:
    folder = planted(tmp_path / "m")
    weights = load(folder, allow_nan=True)
    save_gguf(weights, tmp_path / "m.gguf")
    bytes_done: list[tuple[int, int]] = []
    with opened(tmp_path / "m.gguf") as source:
        found = {
            (t.layer, t.role): t for t in scan_scales(source, lambda done, total, _: bytes_done.append((done, total)))
        }
    plain = scanned(folder)
    assert bytes_done[-1][0] == bytes_done[-1][1] > 0
    for place, t in found.items():
        assert t.counts == plain[place].counts
        assert t.row_spread == plain[place].row_spread
        assert (t.loud_rows, t.loud_columns) == (plain[place].loud_rows, plain[place].loud_columns)
        matrix = weights.layers[place[0] or 0].__dict__[place[1]]
        groups = formats.dequantize(matrix, torch.float32).unflatten(-1, (-1, 32))
        assert t.zero_groups == int((groups == 0).all(-1).sum())
    assert (found[0, "down"].zero_groups, found[0, "down"].zero_codes) == (3, 2)


def test_the_cache_serves_the_same_files_and_no_others(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planted(tmp_path / "m")
    with opened(folder) as source:
        first = scan_model(folder, source)
        (kept,) = cache.glob("*.json")
        assert list(folder.glob(".*")) == []  # nothing appears in the model's folder
        raw = json.loads(kept.read_text())
        raw["tensors"][0]["row_spread"] = 99
        kept.write_text(json.dumps(raw))
        assert scan_model(folder, source)[0].row_spread == 99
        kept.write_text("{")
        assert scan_model(folder, source) == first
    Checkpoint.read(EMBEDDED).write(folder, EMBEDDED)
    with opened(folder) as source:
        assert scan_model(folder, source) != first


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "file"))
    with opened(EMBEDDED) as source:
        assert scan_model(EMBEDDED, source)


def test_a_file_that_shrinks_is_one_sentence(tmp_path: Path) -> None:
    folder = planted(tmp_path / "m")
    with opened(folder) as source:
        file = folder / "model.safetensors"
        with file.open("r+b") as f:
            f.truncate(file.stat().st_size // 4)
        with pytest.raises(CheckpointError, match="ends early"):
            scan_scales(source)
