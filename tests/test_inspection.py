"""`halfbyte inspect`: every field against numbers that are planted and computed independently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.variants import ATTENTION_NORM, SAME, Checkpoint, K, O, Q, V, add_loud_channels, write_variant
from halfbyte import inspection
from halfbyte.cli import app as cli
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats import MXTensor, dequantize, quantize_weight
from halfbyte.gates import PRESETS
from halfbyte.inspection import SAMPLE_ROWS, Inspection, Range, inspect_model
from halfbyte.model.checkpoint import load, save_gguf
from halfbyte.model.load import EMBEDDED, read_facts, resolve_model
from halfbyte.roofline import gpu_named

ROOF = gpu_named("H200")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path / "cache"))


def ranges(i: Inspection) -> dict[str, Range]:
    return {r.role: r for r in i.ranges}


def test_planted_values_are_found(tmp_path: Path) -> None:
    model = Checkpoint.read(EMBEDDED)
    layers = list(model.layers())
    layers[2]["self_attn.sinks"][0] = -50.0
    layers[3]["input_layernorm.weight"][9] = 77.0
    layers[4]["mlp.router.weight"][3] *= 64.0
    layers[5][f"{O}.weight"][:, 11] *= 64.0
    layers[6][f"{Q}.bias"][4], layers[6][f"{Q}.bias"][5] = float("nan"), float("inf")
    layers[1]["mlp.router.bias"].zero_()
    folder = model.write(tmp_path / "m", EMBEDDED)
    i = inspect_model(str(folder), ROOF)
    values = ranges(i)
    sinks = torch.stack([layer["self_attn.sinks"].float() for layer in layers])
    found = values["sinks"]
    assert (found.low, found.high, found.high_layer) == (-50.0, float(sinks.max()), 2)
    assert found.rms == pytest.approx(float(sinks.double().square().mean().sqrt()))
    assert found.smallest == float(sinks.abs().min())
    assert (values["attn_norm"].high, values["attn_norm"].high_layer) == (77.0, 3)
    router = values["router"].loud_rows
    assert router is not None
    assert (router.count, router.layer, router.index) == (1, 4, 3)
    largest = layers[4]["mlp.router.weight"].float().abs().amax(1)
    assert router.ratio == pytest.approx(float(largest.max() / largest.median()))
    columns = values["o"].loud_columns
    assert columns is not None
    assert (columns.count, columns.layer, columns.index) == (1, 5, 11)
    assert values["qkv_bias"].nonfinite == 2
    assert sum(r.nonfinite for r in i.ranges) == 2
    assert i.zero_tensors == ("layer 1 router_bias",)


def test_shapes_bytes_and_formats(tmp_path: Path) -> None:
    i = inspect_model(None, ROOF)
    tensors = Checkpoint.read(EMBEDDED).tensors
    assert i.bytes == sum(t.nbytes for t in tensors.values())
    packed = [n for n in tensors if n.endswith(("_blocks", "_scales"))]
    plain = sum(t.numel() for n, t in tensors.items() if n not in packed)
    assert i.parameters == plain + sum(2 * tensors[n].numel() for n in packed if n.endswith("_blocks"))
    assert i.files == 2
    by_role = {g.role: g for g in i.tensors}
    assert (by_role["qkv"].formats, by_role["qkv"].shape, by_role["qkv"].tensors) == (("bf16",), (768, 256), 8)
    assert by_role["down"].formats == ("mxfp4",)
    facts = read_facts(resolve_model(None))
    assert i.presets[0].preset == "exact"
    for p in i.presets:
        assert p.weight_bytes == facts.weight_bytes(PRESETS[p.preset].gates)
    speeds = {p.preset: p.tokens_per_second for p in i.presets}
    assert speeds["exact"] < speeds["balanced"] < speeds["fast"]


def test_the_error_of_a_preset_is_that_of_its_weights_behind_their_norm(tmp_path: Path) -> None:
    """The output projection, which has no norm in front: by hand. Quantised qkv: its norm decides what counts."""
    i = inspect_model(None, ROOF)
    errors = {p.preset: p.errors for p in i.presets}
    assert errors["exact"] == {"qkv": None, "o": None, "lm_head": None}
    squares, worst = [], (0.0, -1)
    for at, layer in enumerate(Checkpoint.read(EMBEDDED).layers()):
        rows = layer[f"{O}.weight"]
        sample = rows[torch.linspace(0, rows.shape[0] - 1, SAMPLE_ROWS).round().long()]
        off = dequantize(quantize_weight(sample, "mxfp4")) - sample.float()
        error = float(off.norm() / sample.float().norm())
        squares.append(error**2)
        worst = max(worst, (error, at))
    found = errors["fast"]["o"]
    assert found is not None
    assert found.mean == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-4)
    assert (found.worst, found.worst_layer) == (pytest.approx(worst[0], rel=1e-4), worst[1])
    balanced = errors["balanced"]["qkv"]
    assert balanced is not None
    assert 0.002 < balanced.mean < 0.01


def test_the_norm_in_front_weighs_the_error(tmp_path: Path) -> None:
    """One column of each group is far louder than the others, and its norm takes that back: the error is that of the
    loaded weights behind their loaded norms, over all rows."""
    model = Checkpoint.read(EMBEDDED)
    for layer in model.layers():
        layer[ATTENTION_NORM][0::32] *= 2.0**-4
        for name in (Q, K, V):
            layer[f"{name}.weight"][:, 0::32] *= 2.0**4
    folder = model.write(tmp_path / "m", EMBEDDED)
    squares = []
    for exact, rounded in zip(*(load(folder, layer_formats=f).layers for f in ({}, {"qkv": "mxfp4"}))):
        assert isinstance(exact.qkv, torch.Tensor)
        assert isinstance(rounded.qkv, MXTensor)
        wanted = exact.qkv.float() * exact.attn_norm.float()
        off = dequantize(rounded.qkv) * rounded.attn_norm.float() - wanted
        squares.append(float(off.norm() / wanted.norm()) ** 2)
    error = {p.preset: p.errors["qkv"] for p in inspect_model(str(folder), ROOF).presets}["fast"]
    assert error is not None
    assert error.mean == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=0.05)


def test_a_gguf(tmp_path: Path) -> None:
    save_gguf(load(EMBEDDED), tmp_path / "m.gguf", dense="q8")
    done: list[tuple[int, int, str]] = []
    i = inspect_model(str(tmp_path / "m.gguf"), ROOF, lambda *step: done.append(step))
    plain = inspect_model(None, ROOF)
    assert [(s.role, s.largest, s.smallest, s.zero_codes) for s in i.scales] == [
        (s.role, s.largest, s.smallest, s.zero_codes) for s in plain.scales
    ]
    assert all(s.zero_groups == 0 for s in i.scales)
    assert {g.role: g.formats for g in i.tensors}["qkv"] == ("q8",)
    assert ranges(i)["qkv"].denormal_scales is not None
    assert ranges(i)["sinks"] == ranges(plain)["sinks"]
    assert done[0][1] > 0


def test_loud_channels_show_as_a_bias(tmp_path: Path) -> None:
    model = Checkpoint.read(EMBEDDED)
    add_loud_channels(model, 3e5)
    i = inspect_model(str(model.write(tmp_path / "m", EMBEDDED)), ROOF)
    assert ranges(i)["o_bias"].high == pytest.approx(3e5, rel=0.01)
    assert ranges(i)["o_bias"].high_layer == 1


@pytest.mark.parametrize("name", ["residual x 2^12", "experts spread by 8", "attention spread by 3"])
def test_variants_differ_where_they_should(tmp_path: Path, name: str) -> None:
    assert name in SAME
    write_variant(name, EMBEDDED, tmp_path / "m")
    i, plain = inspect_model(str(tmp_path / "m"), ROOF), inspect_model(None, ROOF)
    scales, before = ({s.role: s for s in each.scales} for each in (i, plain))
    assert (scales["down"].largest - before["down"].largest) == (12 if "residual" in name else 0)
    assert (scales["gate_up"].row_spread > 8) == ("experts" in name)
    assert (ranges(i)["attn_norm"].high > 2 * ranges(plain)["attn_norm"].high) == ("attention" in name)


def test_what_cannot_be_inspected_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="random:20b"):
        inspect_model("random:20b", ROOF)
    folder = Checkpoint.read(EMBEDDED).write(tmp_path / "m", EMBEDDED)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspect_model(str(folder), ROOF)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.lab.machine.device_roof", lambda *_: ROOF)
    result = CliRunner().invoke(cli.app, ["inspect", "tiny", "--json"])
    assert result.exit_code == 0, result.output
    raw = json.loads(result.stdout)
    assert raw["schema"] == "halfbyte.inspection/1"
    fields = {"model", "config", "files", "bytes", "parameters", "tensors", "scales", "ranges", "zero_tensors"}
    assert fields | {"presets", "machine", "notes", "schema"} == set(raw)
    assert {"largest", "smallest", "row_spread", "zero_codes", "zero_share", "nan_codes", "far"} <= set(
        raw["scales"][0]
    )
    assert all(isinstance(p["tokens_per_second"], float) for p in raw["presets"])
    result = CliRunner().invoke(cli.app, ["inspect", "tiny"])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) < 50  # one screen
    for word in ("gate_up", "sinks", "balanced", "2^-1 (code 126"):
        assert word in result.stdout


@pytest.mark.exact  # maxima, and one sum by one function on both sides
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_say_what_numbers_say(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(4)
    usual = torch.randn((70, 96), generator=draw).to(dtype)
    sparse = torch.where(torch.rand((70, 96), generator=draw) < 0.9, 0.0, -usual.float() * 1e-6).to(dtype)
    for x in (usual, usual.T, sparse, torch.zeros((3, 4), dtype=dtype), -usual.abs()):
        fast, plain = inspection._piece_of_bits(x), inspection._piece_of_numbers(x)
        assert fast is not None
        assert fast[:3] == plain[:3]
        assert fast.squares == plain.squares
        assert (fast.nonfinite, plain.nonfinite) == (0, 0)
        for mine, theirs in ((fast.rows, plain.rows), (fast.columns, plain.columns)):
            assert mine is not None
            assert torch.equal(mine, theirs)  # type: ignore[arg-type]
    usual[3, 3] = torch.inf
    assert inspection._piece_of_bits(usual) is None  # counted the slow way
    assert inspection._piece_of_numbers(usual).nonfinite == 1
