"""Weights that the library lays out while it reads them: the bits of torch's own way, from every kind of file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.errors import CheckpointError
from halfbyte.formats import DenseTiles, layouts, rows16
from halfbyte.formats.stored import Packer, Stored, StoredRows
from halfbyte.formats.tensor import MXTensor
from halfbyte.kernels.cpu.library import open_library, usable_sets
from halfbyte.kernels.cpu.packing import packer_of
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.weights import GROUPS, Weights

SMALL = NAMED["small"].with_(pad_token=2)
ROWS16 = dict.fromkeys(GROUPS, "rows16")
SHAPES = [(16, 32), (1, 64), (33, 96), (3, 40, 64), (2, 700, 2880)]


@pytest.fixture(scope="module", params=[usable_sets()[0].name, "portable"])
def packer(request: pytest.FixtureRequest) -> Packer:
    return packer_of(open_library(request.param), 3)


def on_disk(folder: Path, *tensors: Tensor) -> tuple[list[int], list[int]]:
    """(descriptor, offset) of each in one file, at odd places; pytest's folder goes with its files."""
    path, offsets, at = folder / f"{len(list(folder.iterdir()))}.bin", [], 0
    with open(path, "wb") as file:
        for t in tensors:
            file.write(b"\x55" * 7)
            offsets.append(at + 7)
            raw = t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            file.write(raw)
            at += 7 + len(raw)
    return [os.open(path, os.O_RDONLY)] * len(tensors), offsets


def random_blocks(form: formats.FormatName, shape: tuple[int, ...], seed: int) -> MXTensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return formats.quantize(made, form)


def bits(m: MXTensor | DenseTiles) -> Tensor:
    return m.data


# ---- one matrix ----------------------------------------------------------------------------------------------------


@pytest.mark.exact
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["mxfp4", "q8"])
@pytest.mark.parametrize("blocks", ["plain", "gguf"])
def test_blocks_have_the_bits_of_torchs_way(
    packer: Packer, tmp_path: Path, form: formats.FormatName, blocks: str, shape: tuple[int, ...]
) -> None:
    plain = random_blocks(form, shape, sum(shape))
    if blocks == "gguf":
        (fd,), (at,) = on_disk(tmp_path, layouts.convert(plain, "gguf").data)
        part = StoredRows(fd, at, shape[-2])
    else:
        (fd, scale_fd), (at, scale_at) = on_disk(tmp_path, plain.data, plain.scales)
        part = StoredRows(fd, at, shape[-2], scale_file=scale_fd, scale_offset=scale_at)
    packed, finite = packer.pack(Stored(form, shape, (part,), gguf=blocks == "gguf"))
    want = rows16.pack(plain)
    assert finite
    assert isinstance(packed, MXTensor)
    assert (packed.shape, packed.format, packed.layout) == (want.shape, want.format, want.layout)
    assert bits(packed).equal(bits(want))


@pytest.mark.exact
@pytest.mark.parametrize("blocks", ["plain", "gguf"])
def test_groups_of_zeros_get_an_ordinary_scale(packer: Packer, tmp_path: Path, blocks: str) -> None:
    """Bytes 0 and 1 mean subnormal scales, for which the products leave their vector code."""
    plain = random_blocks("mxfp4", (35, 160), 9)
    plain.data.view(35, 5, 16)[3, :, :] = 0
    plain.data.view(35, 5, 16)[7, 2, :] = 0x88  # minus zeros
    plain.scales[3] = torch.tensor([0, 1, 2, 127, 254])
    plain.scales[7, 2] = 1
    plain.scales[8, 1] = 0  # a group that is not zero keeps its scale
    if blocks == "gguf":
        (fd,), (at,) = on_disk(tmp_path, layouts.convert(plain, "gguf").data)
        part = StoredRows(fd, at, 35)
    else:
        (fd, scale_fd), (at, scale_at) = on_disk(tmp_path, plain.data, plain.scales)
        part = StoredRows(fd, at, 35, scale_file=scale_fd, scale_offset=scale_at)
    packed, _ = packer.pack(Stored("mxfp4", (35, 160), (part,), gguf=blocks == "gguf"))
    assert isinstance(packed, MXTensor)
    assert bits(packed).equal(bits(rows16.pack(plain)))
    again = rows16.unpack(packed)
    assert formats.dequantize(again).equal(formats.dequantize(plain))
    assert again.scales[3].tolist() == [127, 127, 2, 127, 254]
    assert (again.scales[7, 2], again.scales[8, 1]) == (127, 0)
    scales = bits(packed)[..., 5 * 16 * 16 :][..., : 5 * 16]
    assert (scales < 2).sum() == 1  # rows past the last one have an ordinary scale, too


@pytest.mark.exact
@pytest.mark.parametrize("dtype", rows16.DENSE, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (5, 7), (37, 100), (2, 19, 33)], ids=str)
def test_numbers_have_the_bits_of_torchs_way(
    packer: Packer, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (fd,), (at,) = on_disk(tmp_path, w)
    form = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    packed, finite = packer.pack(Stored(form, shape, (StoredRows(fd, at, shape[-2]),)))
    assert finite
    assert isinstance(packed, DenseTiles)
    assert bits(packed).equal(bits(DenseTiles.of(w, "rows16")))
    assert packed.plain().equal(w)


@pytest.mark.exact
@pytest.mark.parametrize("form", ["mxfp4", "q8"])
def test_widened_blocks_are_the_reference_s_numbers(packer: Packer, tmp_path: Path, form: formats.FormatName) -> None:
    plain = random_blocks(form, (41, 320), 5)
    plain.data[3, :8] = torch.tensor([0x88, 0x08, 0x80, 0, 0x7F, 0xF7, 1, 2]).to(plain.data.dtype)  # minus zero, too
    if form == "mxfp4":
        plain.scales[5, :4] = torch.tensor([0, 1, 254, 2], dtype=torch.uint8)
    (fd,), (at,) = on_disk(tmp_path, layouts.convert(plain, "gguf").data)
    wide, finite = packer.widen(Stored(form, (41, 320), (StoredRows(fd, at, 41),), gguf=True))
    assert finite
    assert wide.view(torch.int32).equal(formats.dequantize(plain).view(torch.int32))


@pytest.mark.parametrize("form", ["mxfp4", "q8", "bf16", "f16", "f32"])
@pytest.mark.parametrize("gguf", [False, True])
def test_one_number_that_is_not_finite_is_seen(packer: Packer, tmp_path: Path, form: str, gguf: bool) -> None:
    shape = (50, 96)
    if form in ("mxfp4", "q8"):
        m = random_blocks("q8" if form == "q8" else "mxfp4", shape, 1)
        m.scales[49, 1] = 255 if form == "mxfp4" else float("inf")
        tensors = [layouts.convert(m, "gguf").data] if gguf else [m.data, m.scales]
    else:
        w = torch.zeros(shape, dtype={"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form])
        w[49, 95] = float("nan") if gguf else float("-inf")
        tensors = [w]
    fds, offsets = on_disk(tmp_path, *tensors)
    part = StoredRows(fds[0], offsets[0], 50, scale_file=fds[-1], scale_offset=offsets[-1])
    stored = Stored(form, shape, (part,), gguf=gguf and form in ("mxfp4", "q8"))
    assert not packer.pack(stored)[1]
    if form not in ("mxfp4", "q8"):
        assert not packer.look(stored)
    if stored.gguf:
        assert not packer.widen(stored)[1]


def test_a_file_that_ends_early_is_said(packer: Packer, tmp_path: Path) -> None:
    (fd,), (at,) = on_disk(tmp_path, torch.zeros((20, 64), dtype=torch.bfloat16))
    with pytest.raises(EOFError):
        packer.pack(Stored("bf16", (21, 64), (StoredRows(fd, at, 21),)))
    with pytest.raises(OSError, match="Bad file descriptor"):
        packer.pack(Stored("bf16", (20, 64), (StoredRows(-1, at, 20),)))


# ---- models --------------------------------------------------------------------------------------------------------


def assert_same_bits(a: Weights, b: Weights) -> None:
    for (layer, role, x), (_, _, y) in zip(a.items(), b.items(), strict=True):
        assert type(x) is type(y), (layer, role)
        assert tuple(x.shape) == tuple(y.shape), (layer, role)
        if isinstance(x, Tensor):
            assert isinstance(y, Tensor)
            assert x.dtype == y.dtype
            assert x.equal(y), (layer, role)
        else:
            assert not isinstance(y, Tensor)
            assert x.layout == y.layout, (layer, role)
            assert bits(x).equal(bits(y)), (layer, role)


@pytest.mark.exact
@pytest.mark.parametrize("kind", ["folder", "folder-q8", "gguf", "gguf-q8", "gguf-mxfp4", "gguf-f16"])
def test_a_model_loads_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("m.gguf" if kind.startswith("gguf") else "model")
    form = kind.partition("-")[2]
    weights = synthetic.make(SMALL, 7)
    if form in ("q8", "mxfp4"):
        weights = checkpoint.assemble(
            checkpoint.MemorySource(weights), layer_formats=dict.fromkeys(("qkv", "o", "lm_head"), form)
        )
    if kind.startswith("gguf"):
        checkpoint.save_gguf(weights, path, dense="f16" if form == "f16" else "q8" if form == "q8" else None)
    else:
        checkpoint.save_safetensors(weights, path, max_shard_bytes=300_000)
    packer = packer_of(open_library(), 2)
    direct = checkpoint.load(path, layouts=ROWS16, packer=packer)
    assert_same_bits(direct, checkpoint.load(path, layouts=ROWS16))
    # What is quantised anew is not read directly; the rest still is.
    anew = {"o": "q8"}
    assert_same_bits(
        checkpoint.load(path, layouts=ROWS16, layer_formats=anew, packer=packer),
        checkpoint.load(path, layouts=ROWS16, layer_formats=anew),
    )


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    weights = synthetic.make(SMALL, 7)
    gate_up = weights.layers[1].gate_up
    assert isinstance(gate_up, MXTensor)
    gate_up.scales[0, 3, 0] = 255
    weights.embed[5, 1] = float("nan")
    checkpoint.save_safetensors(weights, tmp_path / "model", max_shard_bytes=10**9)
    packer = packer_of(open_library(), 2)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*has 1 value.*gate_up_proj_scales.*has 1 value"):
        checkpoint.load(tmp_path / "model", layouts=ROWS16, packer=packer)
    assert checkpoint.load(tmp_path / "model", layouts=ROWS16, packer=packer, allow_nan=True).embed[5, 1].isnan()


def test_a_file_cut_while_it_is_loaded_is_one_sentence(tmp_path: Path) -> None:
    checkpoint.save_gguf(synthetic.make(SMALL, 7), tmp_path / "m.gguf")
    packer = packer_of(open_library(), 2)

    def cut(*_: object) -> None:
        os.truncate(tmp_path / "m.gguf", 200_000)

    with pytest.raises(CheckpointError, match=r"m\.gguf.*truncated"):
        checkpoint.load(tmp_path / "m.gguf", layouts=ROWS16, packer=packer, progress=cut)


def test_the_embedding_stays_in_its_file(tmp_path: Path) -> None:
    """Pages of it come in when they are looked at; what is written to it is ours alone."""
    checkpoint.save_gguf(synthetic.make(SMALL, 7), tmp_path / "m.gguf")
    before = (tmp_path / "m.gguf").read_bytes()
    weights = checkpoint.load(tmp_path / "m.gguf", layouts=ROWS16, packer=packer_of(open_library(), 2))
    maps = Path("/proc/self/smaps")
    if maps.exists():
        start = weights.embed.data_ptr()
        ranges = [line.split() for line in maps.read_text().splitlines() if "-" in line.split()[0]]
        inside = [r for r in ranges if int(r[0].split("-")[0], 16) <= start < int(r[0].split("-")[1], 16)]
        assert inside[0][-1] == str(tmp_path / "m.gguf")
    weights.embed.zero_()
    assert (tmp_path / "m.gguf").read_bytes() == before
