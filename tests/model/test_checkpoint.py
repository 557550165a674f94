"""What is written comes back bit for bit, from folders and GGUF files, through us and through other readers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from halfbyte import formats
from halfbyte.errors import CheckpointError, FormatError, GateError
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import Gates, format_of_layer
from halfbyte.model import checkpoint, load, synthetic, weight_file
from halfbyte.model.config import NAMED, ModelConfig, Yarn
from halfbyte.model.config_json import to_config_json
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weights import GROUPS, Matrix, Weights, format_of, shape_of
from tests.reference import REFERENCE

SMALL = NAMED["small"].with_(pad_token=2)
ALL_Q8 = {"moe": "q8", "qkv": "q8", "o": "q8", "lm_head": "q8"}
MIXED = {"qkv": "mxfp4", "o": "q8", "lm_head": "mxfp4"}
BY_LAYER = {"qkv": "mxfp4", "qkv.full": "q8", "qkv.0": "checkpoint", "o": "q8", "moe.1": "q8"}


@pytest.fixture(scope="module")
def small_model() -> Weights:
    return synthetic.make(SMALL, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    synthetic.write_safetensors(SMALL, 7, path, max_shard_bytes=400_000)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    synthetic.write_gguf(SMALL, 7, path)
    return path


def same(a: Matrix, b: Matrix) -> bool:
    if isinstance(a, MXTensor) or isinstance(b, MXTensor):
        assert isinstance(a, MXTensor)
        assert isinstance(b, MXTensor)
        same_tag = (a.format, a.layout, a.shape) == (b.format, b.layout, b.shape)
        return same_tag and a.data.equal(b.data) and a.scales.equal(b.scales)
    return a.dtype == b.dtype and a.equal(b)


def assert_same(a: Weights, b: Weights, *, config: bool = True) -> None:
    if config:
        assert a.config.with_(name="") == b.config.with_(name="")
    for (layer, role, x), (_, _, y) in zip(a.items(), b.items(), strict=True):
        assert same(x, y), (layer, role, format_of(x), format_of(y))


def logits(weights: Weights, tokens: list[int]) -> torch.Tensor:
    return SingleSequence(GptOss(weights, REFERENCE), len(tokens)).feed(tokens, all_logits=True)


# ---- the same weights, whatever they are written as ----------------------------------------------------------------


def test_a_folder_and_a_gguf_hold_the_same_bits(small_model: Weights, folder: Path, file: Path) -> None:
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    from_folder, from_file = checkpoint.load(folder), checkpoint.load(file)
    assert_same(small_model, from_folder)
    assert_same(small_model, from_file)
    assert all(format_of(w) == "mxfp4" for _, role, w in from_file.items() if role in ("gate_up", "down"))


def test_loaded_experts_are_the_file_s_bytes(folder: Path) -> None:
    """MXFP4 is kept packed: what is in memory is what is on disk, not something requantised that happens to match."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.2.mlp.experts.gate_up_proj"
    from safetensors import safe_open

    with safe_open(folder / index[f"{name}_blocks"], framework="pt") as f:
        blocks = f.get_tensor(f"{name}_blocks")
    gate_up = checkpoint.load(folder).layers[2].gate_up
    assert isinstance(gate_up, MXTensor)
    assert blocks.shape == (SMALL.experts, 2 * SMALL.intermediate, SMALL.hidden // 32, 16)
    assert gate_up.data.equal(blocks.flatten(-2))


def test_saving_what_was_loaded_changes_nothing(small_model: Weights, tmp_path: Path) -> None:
    packed = checkpoint.assemble(
        checkpoint.MemorySource(small_model), layouts={"gate_up": "tile16", "down": "w4a8_split"}
    )
    checkpoint.save_safetensors(packed, tmp_path / "folder", max_shard_bytes=10**9)
    checkpoint.save_gguf(packed, tmp_path / "file.gguf")
    assert [p.name for p in (tmp_path / "folder").glob("*.safetensors")] == ["model.safetensors"]
    assert_same(small_model, checkpoint.load(tmp_path / "folder"))
    assert_same(small_model, checkpoint.load(tmp_path / "file.gguf"))


def test_writing_is_deterministic(file: Path, tmp_path: Path) -> None:
    synthetic.write_gguf(SMALL, 7, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


def test_hugging_face_reads_our_folder(folder: Path, small_model: Weights) -> None:
    """Their loader dequantises MXFP4 on a CPU: same names, same layout, same nibble order, or the logits differ."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    theirs = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    ).float()
    tokens = list(range(5, 205))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    got = logits(small_model, tokens)
    assert (got - expected).norm() / expected.norm() < 1e-4


def test_a_dequantised_folder_as_transformers_saves_it(folder: Path, tmp_path: Path, small_model: Weights) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    loaded = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    raw = to_config_json(SMALL)
    raw.pop("quantization_config")
    theirs = GptOssForCausalLM(GptOssConfig(**raw)).to(torch.bfloat16)
    theirs.load_state_dict(loaded.state_dict())
    theirs.save_pretrained(tmp_path / "dense")
    dense = checkpoint.load(tmp_path / "dense")
    for ours, packed in zip(dense.layers, small_model.layers):
        assert isinstance(ours.down, torch.Tensor)
        assert isinstance(packed.down, MXTensor)
        assert isinstance(packed.gate_up, MXTensor)
        assert ours.down.equal(formats.dequantize(packed.down, torch.bfloat16))
        assert ours.gate_up.equal(formats.dequantize(packed.gate_up, torch.bfloat16))
    checkpoint.save_safetensors(dense, tmp_path / "again")
    assert_same(dense, checkpoint.load(tmp_path / "again"))
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    back = checkpoint.load(tmp_path / "again", layer_formats={"moe": "mxfp4"})  # every value is one MXFP4 can hold
    down, packed_down = back.layers[0].down, small_model.layers[0].down
    assert isinstance(down, MXTensor)
    assert isinstance(packed_down, MXTensor)
    assert formats.dequantize(down).equal(formats.dequantize(packed_down))


def test_the_gguf_package_reads_our_file(file: Path, small_model: Weights) -> None:
    reader = gguf.GGUFReader(file)
    tensors = {t.name: t for t in reader.tensors}
    gate = gguf.quants.dequantize(tensors["blk.1.ffn_gate_exps.weight"].data, gguf.GGMLQuantizationType.MXFP4)
    up = gguf.quants.dequantize(tensors["blk.1.ffn_up_exps.weight"].data, gguf.GGMLQuantizationType.MXFP4)
    ours = small_model.layers[1].gate_up
    assert isinstance(ours, MXTensor)
    values = formats.dequantize(ours).numpy()
    assert np.array_equal(gate, values[:, 0::2])
    assert np.array_equal(up, values[:, 1::2])
    assert tensors["blk.1.attn_sinks.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert reader.get_field("general.architecture").contents() == "gpt-oss"
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-4o"


# ---- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer_formats", [ALL_Q8, MIXED, {"moe": "checkpoint"}, BY_LAYER], ids=["q8", "mixed", "checkpoint", "by layer"]
)
@pytest.mark.parametrize("target", ["folder", "file.gguf"])
def test_quantising_to_disk_equals_quantising_at_load(
    folder: Path, file: Path, tmp_path: Path, layer_formats: dict[str, str], target: str
) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    for src in (folder, file):
        dst = tmp_path / src.name / target
        checkpoint.quantize_checkpoint(src, dst, layer_formats, max_shard_bytes=3_000_000)
        at_load = checkpoint.load(src, layer_formats=layer_formats)
        assert_same(at_load, checkpoint.load(dst))
        if dst.is_dir():
            assert (dst / "tokenizer_config.json").exists() == (src == folder)
    for layer, role, w in at_load.items():
        kind = None if layer is None else SMALL.layer_kinds[layer]
        target = format_of_layer(layer_formats, GROUPS.get(role, ""), layer, kind)
        assert target in ("checkpoint", format_of(w))


def test_a_quantised_folder_says_so_and_is_believed_only_if_true(folder: Path, tmp_path: Path) -> None:
    dst = tmp_path / "q"
    checkpoint.quantize_checkpoint(folder, dst, MIXED)
    raw = json.loads((dst / "config.json").read_text())
    assert raw["halfbyte"]["formats"] == {"qkv": "mxfp4", "o": "q8", "moe": "mxfp4", "lm_head": "mxfp4"}
    assert raw["quantization_config"]["quant_method"] == "halfbyte"
    raw["halfbyte"]["formats"]["o"] = "mxfp4"
    (dst / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json says o is mxfp4, but .* is q8"):
        checkpoint.load(dst)


def test_a_folder_whose_layers_differ_says_so(folder: Path, tmp_path: Path) -> None:
    dst = tmp_path / "q"
    checkpoint.quantize_checkpoint(folder, dst, {"qkv": "mxfp4", "qkv.full": "q8"})
    raw = json.loads((dst / "config.json").read_text())
    assert raw["halfbyte"]["formats"]["qkv"] == "mxfp4"
    assert raw["halfbyte"]["formats"]["qkv.1"] == "q8"
    name = load.resolve_model(str(dst))
    model = load.load_model(name)
    assert model.weights.formats().per_layer("qkv") == ("mxfp4", "q8") * (SMALL.layers // 2)
    assert load.read_facts(name).formats == model.weights.formats() | {"embed": "bf16"}
    assert load.weight_bytes(name, Gates()) == checkpoint.load(dst).nbytes
    assert "q8 in layers 1, 3" in model.plan.selection.formats["qkv"]
    raw["halfbyte"]["formats"]["qkv.1"] = "mxfp4"
    (dst / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"says qkv is mxfp4, but .*layers\.1\..* is q8"):
        checkpoint.load(dst)


def test_requantised_weights_are_close_and_untouched_ones_equal(small_model: Weights, folder: Path) -> None:
    loaded = checkpoint.load(folder, layer_formats={"qkv": "q8", "moe": "q8"})
    for ours, original in zip(loaded.layers, small_model.layers):
        assert isinstance(ours.qkv, MXTensor)
        assert isinstance(original.qkv, torch.Tensor)
        folded = original.qkv.float() * original.attn_norm.float()
        assert (formats.dequantize(ours.qkv) - folded).norm() / folded.norm() < 0.01
        assert isinstance(ours.down, MXTensor)
        assert isinstance(original.down, MXTensor)
        exact = formats.dequantize(original.down)
        assert (formats.dequantize(ours.down) - exact).norm() / exact.norm() < 0.01
        assert same(ours.o, original.o)


def test_a_norm_moves_into_the_matrix_that_is_quantised_behind_it(small_model: Weights, folder: Path) -> None:
    """The columns are multiplied in float32: the product of two bf16 numbers is none."""
    loaded = checkpoint.load(folder, layer_formats={"qkv": "mxfp4", "lm_head": "q8"})
    for ours, original in zip(loaded.layers, small_model.layers):
        assert isinstance(original.qkv, torch.Tensor)
        assert ours.attn_norm.equal(torch.ones_like(original.attn_norm))
        assert same(ours.qkv, formats.quantize_weight(original.qkv.float() * original.attn_norm.float(), "mxfp4"))
        assert ours.mlp_norm.equal(original.mlp_norm)
    assert isinstance(small_model.lm_head, torch.Tensor)
    folded = small_model.lm_head.float() * small_model.final_norm.float()
    assert same(loaded.lm_head, formats.quantize_weight(folded, "q8"))
    assert loaded.final_norm.equal(torch.ones_like(small_model.final_norm))
    assert loaded.output_norm.equal(small_model.final_norm)
    assert (loaded.output_head() - small_model.lm_head.float()).norm() < 0.01 * small_model.lm_head.float().norm()
    again = checkpoint.assemble(checkpoint.MemorySource(loaded), layouts={"qkv": "tile16"})
    assert again.output_norm.equal(small_model.final_norm)


@pytest.mark.parametrize("groups", [{}, {"o": "q8", "moe": "q8"}])
def test_norms_stay_in_front_of_matrices_that_are_not_quantised(
    small_model: Weights, folder: Path, groups: dict[str, str]
) -> None:
    loaded = checkpoint.load(folder, layer_formats=groups)
    assert loaded.folded_norm is None
    assert loaded.final_norm.equal(small_model.final_norm)
    assert [a.attn_norm.equal(b.attn_norm) for a, b in zip(loaded.layers, small_model.layers)] == [True] * SMALL.layers


def test_a_matrix_that_the_file_holds_quantised_stays_as_it_is(small_model: Weights, tmp_path: Path) -> None:
    checkpoint.save_gguf(small_model, tmp_path / "m.gguf", dense="q8")
    stored, loaded = (
        checkpoint.load(tmp_path / "m.gguf", layer_formats=f) for f in ({}, dict.fromkeys(("qkv", "lm_head"), "q8"))
    )
    assert_same(stored, loaded)
    assert loaded.final_norm.equal(small_model.final_norm)
    narrower = checkpoint.load(tmp_path / "m.gguf", layer_formats={"qkv": "mxfp4"})  # quantised again: folded
    assert narrower.layers[0].attn_norm.equal(torch.ones_like(small_model.layers[0].attn_norm))


def test_layouts_are_applied_at_load(folder: Path, small_model: Weights) -> None:
    loaded = checkpoint.load(folder, layouts={"gate_up": "tile16", "qkv": "plain"}, layer_formats={"o": "mxfp4"})
    gate_up = loaded.layers[0].gate_up
    assert isinstance(gate_up, MXTensor)
    assert gate_up.layout == "tile16"
    assert same(formats.convert(gate_up, "plain"), small_model.layers[0].gate_up)
    with pytest.raises(FormatError, match="qkv is"):
        checkpoint.load(folder, layouts={"qkv": "w4a8_split"})
    with pytest.raises(FormatError, match="no weight called"):
        checkpoint.load(folder, layouts={"qvk": "plain"})


@pytest.mark.parametrize("dense", ["checkpoint", "q8", "mxfp4"])
def test_every_format_of_a_dense_layer_takes_the_layout_of_the_cuda_kernels(small_model: Weights, dense: str) -> None:
    """`tile16` for bf16, q8 and MXFP4 alike: the numbers do not change, and a model in it can be written out again."""
    groups = {"qkv": dense, "o": dense, "lm_head": dense}
    plain = checkpoint.assemble(checkpoint.MemorySource(small_model), layer_formats=groups)
    tiled = checkpoint.assemble(
        checkpoint.MemorySource(small_model),
        layer_formats=groups,
        layouts=dict.fromkeys(("qkv", "o", "lm_head"), "tile16"),
    )
    assert tiled.formats() == plain.formats()
    back = checkpoint.assemble(checkpoint.MemorySource(tiled))
    for (_, role, tiles), (_, _, want), (_, _, again) in zip(tiled.items(), plain.items(), back.items()):
        if role in groups:
            assert not isinstance(tiles, torch.Tensor)
            assert tiles.layout == "tile16"
            assert tiles.shape == tuple(want.shape)
        assert same(again, want), role


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"attention": "q8"}, "no layer group 'attention'"),
        ({"qkv": "nvfp4"}, "qkv cannot be 'nvfp4'"),
        ({"qkv.full": "nvfp4"}, "qkv.full cannot be 'nvfp4'"),
        ({"qkv.99": "q8"}, r"qkv\.99, but the model has"),
    ],
)
def test_unknown_layer_formats_are_errors(folder: Path, wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises((FormatError, GateError), match=sentence):
        checkpoint.load(folder, layer_formats=wrong)


@pytest.mark.parametrize("dense", ["bf16", "f16", "f32", "q8"])
def test_dense_types_of_a_gguf(small_model: Weights, tmp_path: Path, dense: str) -> None:
    checkpoint.save_gguf(small_model, tmp_path / "m.gguf", dense=dense)  # type: ignore[arg-type]
    loaded = checkpoint.load(tmp_path / "m.gguf")
    narrow = "q8" if dense == "q8" else "bf16"  # F16 and F32 made from bf16 are read back as bf16
    assert format_of(loaded.lm_head) == narrow
    assert format_of(loaded.layers[3].o) == narrow
    assert format_of(loaded.embed) == "bf16"
    assert format_of(loaded.layers[0].router) == "bf16"
    limit = 0.01 if dense == "q8" else 1e-6  # float16 loses what is below 2^-24
    for role in ("embed", "lm_head"):
        a, b = getattr(loaded, role), getattr(small_model, role).float()
        a = formats.dequantize(a) if isinstance(a, MXTensor) else a.float()
        assert (a - b).norm() / b.norm() <= limit
    assert same(loaded.layers[0].gate_up, small_model.layers[0].gate_up)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_matrix_with_more_bits_than_bf16_keeps_them(
    small_model: Weights, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """One number of one layer is enough, and other roles are narrowed all the same."""
    layers = [dataclasses.replace(layer, o=layer.o.to(dtype), qkv=layer.qkv.to(dtype)) for layer in small_model.layers]
    layers[3].o = layers[3].o.clone()
    layers[3].o[-1, -1] = 1.0 + 2**-9
    fine = dataclasses.replace(small_model, layers=layers)
    if kind == "gguf":
        checkpoint.save_gguf(fine, tmp_path / "m.gguf")
    else:
        checkpoint.save_safetensors(fine, tmp_path / "m.gguf")
    loaded = checkpoint.load(tmp_path / "m.gguf")
    assert loaded.layers[0].o.dtype == loaded.layers[3].o.dtype == dtype
    assert loaded.layers[3].o.equal(layers[3].o)
    assert format_of(loaded.layers[0].qkv) == "bf16"


def test_float16_vectors_are_read(small_model: Weights, tmp_path: Path) -> None:
    """Kernels take bf16 and float32: float16 becomes bf16 where that is exact, else float32."""
    layers = [
        dataclasses.replace(layer, sinks=layer.sinks.half() * 1.003, o_bias=torch.ones_like(layer.o_bias).half())
        for layer in small_model.layers
    ]
    checkpoint.save_safetensors(dataclasses.replace(small_model, layers=layers), tmp_path / "m")
    loaded = checkpoint.load(tmp_path / "m")
    assert loaded.layers[1].sinks.dtype == torch.float32
    assert loaded.layers[1].sinks.equal(layers[1].sinks.float())
    assert loaded.layers[1].o_bias.dtype == torch.bfloat16


def test_float32_that_was_never_bf16_stays_float32(small_model: Weights, tmp_path: Path) -> None:
    layers = [dataclasses.replace(layer) for layer in small_model.layers]
    layers[2].router = layers[2].router.float() * 1.001
    fine = dataclasses.replace(small_model, layers=layers)
    checkpoint.save_gguf(fine, tmp_path / "m.gguf")
    loaded = checkpoint.load(tmp_path / "m.gguf")
    assert [format_of(layer.router) for layer in loaded.layers] == ["f32"] * SMALL.layers  # one dtype for all layers
    assert loaded.layers[2].router.equal(layers[2].router)
    assert format_of(loaded.layers[2].mlp_norm) == "bf16"


@pytest.mark.parametrize("which", ["attn_v.weight", "blk.2.attn_q.weight"], ids=["parts", "layers"])
def test_a_group_of_different_types_needs_a_choice(file: Path, tmp_path: Path, which: str) -> None:
    def some_q8(name: str, tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if name.endswith(which):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
        return tensor.data, tensor.tensor_type

    rewrite(file, tmp_path / "mixed.gguf", some_q8)
    with pytest.raises(CheckpointError, match=r"qkv of layer \d in bf16 and q8; give the group qkv one format"):
        checkpoint.load(tmp_path / "mixed.gguf")
    loaded = checkpoint.load(tmp_path / "mixed.gguf", layer_formats={"qkv": "q8"})
    assert loaded.formats()["qkv"] == "q8"
    ones = [bool((layer.attn_norm == 1).all()) for layer in loaded.layers]
    assert ones == [which != "attn_v.weight" and i != 2 for i in range(SMALL.layers)]  # part of the matrix stays


# ---- GGUF files as others write them -------------------------------------------------------------------------------

Change = Callable[[str, gguf.ReaderTensor], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def rewrite(source: Path, target: Path, change: Change | None = None, **options: int) -> None:
    """Copy a GGUF through the gguf package's reader and writer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "gpt-oss", **options)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        data, kind = change(tensor.name, tensor) if change else (tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.array(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_split_gguf_files(file: Path, tmp_path: Path, small_model: Weights) -> None:
    rewrite(file, tmp_path / "m.gguf", split_max_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    assert_same(small_model, checkpoint.load(parts[0]))
    assert_same(small_model, checkpoint.load(parts[2]))
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(
        CheckpointError, match=f"{parts[1].name} is not there; a split GGUF needs all {len(parts)} parts"
    ):
        checkpoint.load(parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(CheckpointError, match="its name has lost"):
        checkpoint.load(tmp_path / "first.gguf")


def test_configurations_survive_both_ways(tmp_path: Path) -> None:
    configs = [
        NAMED["20b"].with_(
            layers=1,
            layer_kinds=(),
            hidden=64,
            intermediate=32,
            experts=4,
            vocab=300,
            heads=2,
            kv_heads=1,
            eos_tokens=(2,),
        ),
        SMALL.with_(yarn=Yarn(factor=1.0), layers=2, layer_kinds=(), window=64, norm_eps=1e-6, rope_theta=10000.0),
        SMALL.with_(yarn=Yarn(8.0, 256, truncate=True), layers=1, layer_kinds=(), eos_tokens=(3,), pad_token=4),
    ]
    for i, config in enumerate(configs):
        synthetic.write_safetensors(config, 0, tmp_path / str(i))
        synthetic.write_gguf(config, 0, tmp_path / f"{i}.gguf")
        plain = config.with_(name="", yarn=Yarn(factor=1.0) if config.yarn.factor == 1.0 else config.yarn)
        assert checkpoint.read_config(tmp_path / str(i)).with_(name="") == plain
        read = checkpoint.read_config(tmp_path / f"{i}.gguf")
        assert read.with_(name="") == plain
        assert read.name == config.name


@pytest.mark.parametrize(
    "change",
    [
        {"layer_kinds": ("full", "sliding", "full", "sliding")},
        {"swiglu_limit": 5.0},
        {"yarn": Yarn(8.0, 256, beta_fast=16.0)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="GGUF cannot say"):
        synthetic.write_gguf(SMALL.with_(**change), 0, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_goes_into_the_gguf_and_through_quantising(folder: Path, tmp_path: Path) -> None:
    tokens = {"a": 0, "b": 1, "ab": 2}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "model": {"type": "BPE", "vocab": tokens, "merges": [["a", "b"]]},
                "added_tokens": [{"id": 5, "content": "<|return|>", "special": True}],
                "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
            }
        )
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint.quantize_checkpoint(folder, tmp_path / "m.gguf", {})
    checkpoint.quantize_checkpoint(tmp_path / "m.gguf", tmp_path / "again.gguf", {"o": "q8"})
    for name in ("m.gguf", "again.gguf"):
        reader = gguf.GGUFReader(tmp_path / name)
        assert reader.get_field("tokenizer.ggml.tokens").contents(slice(0, 6)) == [
            "a", "b", "ab", "<unused3>", "<unused4>", "<|return|>",
        ]  # fmt: skip
        assert reader.get_field("tokenizer.ggml.token_type").contents(slice(0, 6)) == [1, 1, 1, 5, 5, 3]
        assert reader.get_field("tokenizer.ggml.merges").contents() == ["a b"]
        assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    assert gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.chat_template").contents() == "{{ messages }}"
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()


def test_a_placeholder_vocabulary_spells_bytes(file: Path) -> None:
    tokenizer = Tokenizer.for_model(file)
    assert tokenizer.vocab_size == SMALL.vocab
    assert tokenizer.decode(tokenizer.encode("hello\n é")) == "hello\n é"
    assert tokenizer.encode("AB") == [65, 66]


def test_the_embedded_tokenizer_fits_and_strange_ones_are_refused(tmp_path: Path) -> None:
    from halfbyte.model.gguf_vocab import read_gguf_vocab
    from halfbyte.model.gguf_writer import read_tokenizer

    path = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"
    raw = json.loads(path.read_text())
    synthetic.write_gguf(SMALL.with_(vocab=2048), 0, tmp_path / "m.gguf", tokenizer=path)
    vocabulary = read_gguf_vocab(tmp_path / "m.gguf")
    assert vocabulary.pre == "gpt-4o"
    assert {t: i for i, t in enumerate(vocabulary.tokens) if t in raw["model"]["vocab"]} == raw["model"]["vocab"]
    assert len(vocabulary.merges) == len(raw["model"]["merges"])
    strange = tmp_path / "tokenizer.json"
    for change, words in (
        ({"model": raw["model"] | {"type": "Unigram"}}, "'Unigram' tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for"),
        ({"pre_tokenizer": None}, "no name for"),
        ({"model": {"type": "BPE"}}, "holds no BPE vocabulary"),
    ):
        strange.write_text(json.dumps(raw | change))
        with pytest.raises(CheckpointError, match=words):
            read_tokenizer(strange, 2048)
    with pytest.raises(CheckpointError, match="past the model's vocabulary of 100"):
        read_tokenizer(path, 100)


# ---- progress ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["folder", "file"])
def test_progress_rises_to_the_total(which: str, folder: Path, file: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    checkpoint.load({"folder": folder, "file": file}[which], progress=lambda *a: seen.append(a))
    done = [d for d, _, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1]
    assert {total for _, total, _ in seen} == {seen[0][1]}
    assert any("layer 3 down" in name for _, _, name in seen)


def test_progress_of_making_and_writing(tmp_path: Path) -> None:
    for act in (
        lambda p: synthetic.make(SMALL, 0, progress=p),
        lambda p: synthetic.write_safetensors(SMALL, 0, tmp_path / "m", progress=p),
        lambda p: synthetic.write_gguf(SMALL, 0, tmp_path / "m.gguf", progress=p),
    ):
        seen: list[tuple[int, int, str]] = []
        act(lambda *a: seen.append(a))  # noqa: B023
        assert seen[-1][0] == seen[-1][1]
        assert len(seen) > SMALL.layers


def test_shapes_are_the_configuration_s(small_model: Weights) -> None:
    different = ModelConfig(
        layers=1, hidden=96, intermediate=64, experts=3, top_k=2, heads=4, kv_heads=2, head_dim=16, vocab=100
    )
    for weights in (small_model, synthetic.make(different, 1)):
        for _, role, w in weights.items():
            assert tuple(w.shape) == shape_of(weights.config, role)


def test_large_reads_by_several_readers(tmp_path: Path) -> None:
    """Past the size where a read is shared out, at every alignment of the end."""
    raw = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    (tmp_path / "f").write_bytes(raw.numpy().tobytes())
    reading = weight_file.Reading(torch.device("cpu"))
    file = weight_file.WeightFile(tmp_path / "f", reading)
    for offset, count in ((0, 9 << 20), (3, (8 << 20) + 1), (17, (4 << 20) + 3)):
        assert file.new(offset, (count,), torch.uint8).equal(raw[offset : offset + count])
    with pytest.raises(CheckpointError, match="is truncated"):
        file.new(1, (9 << 20,), torch.uint8)
    file.close()
    reading.close()


def test_weights_that_q8_does_not_hold_are_refused() -> None:
    weights = synthetic.make(SMALL, 0)
    assert isinstance(weights.layers[1].o, torch.Tensor)
    weights.layers[1].o[3, 5] = 1e7
    with pytest.raises(CheckpointError, match=r"layer 1 o has weights past 8319008, .* --layers o=mxfp4"):
        checkpoint.assemble(checkpoint.MemorySource(weights), layer_formats={"o": "q8"})
    loaded = checkpoint.assemble(checkpoint.MemorySource(weights), layer_formats={"o": "mxfp4"})
    assert isinstance(loaded.layers[1].o, MXTensor)
