"""Files and folders with the names and keys of published ones: each is served, or refused by a sentence that leads on.

Every layout is written here from one small model in OpenAI's layout. What is served gives the logits of the same
numbers: exactly where nothing was rounded, else within what q8 rounds. Each has a plan for a GPU, too, or a failure
whose last line is a flag with which there is one.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file, save_file

from halfbyte import formats
from halfbyte.errors import CheckpointError, PlanError
from halfbyte.gates import PRESETS, Gates, parse
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.model.load import OpenCheckpoint, formats_in, load_model, resolve_model
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.weights import Weights
from halfbyte.ops.linear import dense as ops_dense
from halfbyte.plan.phase import ARCHES
from tests.model.file_mutator import encode, problem_of, tokenizer_json
from tests.reference import EXACT_FORM

# As in gpt-oss, hidden is no multiple of 256 and the width of attention is: of all matrices o alone can be a K-quant.
CONFIG = ModelConfig(
    layers=2, hidden=64, intermediate=64, experts=8, top_k=2, heads=4, kv_heads=2, head_dim=64, vocab=320, window=12,
    max_context=256, yarn=Yarn(8.0, 32), eos_tokens=(1,), pad_token=0, name="published",
)  # fmt: skip
TEXT = "the cat and the hat"
Tensors = dict[str, torch.Tensor]
Write = Callable[["Workshop"], Path]  # returns the path that a user would give


@dataclass
class Workshop:
    """A folder of its own for one test, and the model in OpenAI's layout, which the tests must not change."""

    root: Path
    openai: Path
    ggml: Path

    @property
    def tensors(self) -> Tensors:
        return load_file(self.openai / "model.safetensors")

    @property
    def config(self) -> dict[str, Any]:
        raw: dict[str, Any] = json.loads((self.openai / "config.json").read_text())
        return raw

    def folder(
        self, name: str, tensors: Tensors | None, config: dict[str, Any], shards: list[str] | None = None
    ) -> Path:
        """A model folder as a hub's repository has it."""
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        (folder / "generation_config.json").write_text('{"eos_token_id": [1], "temperature": 1.0}')
        (folder / "README.md").write_text("# a model card")
        if tensors is None:
            return folder
        if shards is None:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        names = sorted(tensors)
        weight_map = {name: shards[i * len(shards) // len(names)] for i, name in enumerate(names)}
        for shard in shards:
            save_file({n: tensors[n] for n in names if weight_map[n] == shard}, folder / shard)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def gguf(self, name: str, change: Callable[[str, np.ndarray], T] | None = None, **options: Any) -> Path:
        """The GGUF with tensors in other types; `keys` and `tensors` change the metadata and add tensors."""
        keys, extra = options.pop("keys", {}), options.pop("extra", {})
        reader, target = gguf.GGUFReader(self.ggml), self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(target, options.pop("arch", "gpt-oss"), **options)
        for key, field in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture" and key not in keys:
                sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], sub)
        for key, value in keys.items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                writer.add_uint32(key, value)
        for tensor in reader.tensors:
            kind = tensor.tensor_type if change is None else change(tensor.name, tensor.data)
            data = np.array(tensor.data) if kind == tensor.tensor_type else encode(decode(tensor), kind)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        for key, data in extra.items():
            writer.add_tensor(key, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return target


def decode(tensor: gguf.ReaderTensor) -> np.ndarray:
    return np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("openai")
    synthetic.write_safetensors(CONFIG, 7, root / "model")
    (root / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    synthetic.write_gguf(CONFIG, 7, root / "model.gguf", tokenizer=root / "model" / "tokenizer.json")
    return root / "model", root / "model.gguf"


@pytest.fixture
def workshop(originals: tuple[Path, Path], tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, *originals)


# ---- folders ---------------------------------------------------------------------------------------------------------


def dense(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Experts as transformers saves them once they are dequantised, everything in one type."""
    out = {name: t.to(dtype) for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [n.removesuffix("_blocks") for n in tensors if n.endswith("_blocks")]:
        packed = formats.layouts.from_checkpoint(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        out[name] = formats.dequantize(packed).mT.to(dtype).contiguous()
    return out


def without(config: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names} | more


def shard_names(count: int, last: int, first: int) -> list[str]:
    return [f"model-{i:05}-of-{last:05}.safetensors" for i in range(first, first + count)]


def cached(w: Workshop) -> Path:
    """Hugging Face's cache: snapshots of links into a folder of blobs."""
    repo = w.root / "models--openai--gpt-oss-20b"
    snapshot = repo / "snapshots" / "6cee5e81ee83917806bbde320786a8fb61efebee"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(w.openai.iterdir()):
        shutil.copy(file, repo / "blobs" / f"{i:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    return snapshot


def transformers5(w: Workshop) -> Path:
    config = without(w.config, "rope_scaling", "rope_theta", "torch_dtype", dtype="bfloat16")
    rope = w.config["rope_scaling"] | {"rope_theta": w.config["rope_theta"]}
    return w.folder("openai/gpt-oss-20b", w.tensors, config | {"rope_parameters": rope, "transformers_version": "5.0"})


def old_rope(w: Workshop) -> Path:
    rope = w.config["rope_scaling"] | {"type": "yarn"}
    return w.folder(
        "gpt-oss-20b", w.tensors, without(w.config, rope_scaling={k: v for k, v in rope.items() if k != "rope_type"})
    )


def merged(name: str, dtype: torch.dtype) -> Write:
    def write(w: Workshop) -> Path:
        config = without(w.config, "quantization_config", torch_dtype=str(dtype).removeprefix("torch."))
        return w.folder(name, dense(w.tensors, dtype), config)

    return write


def heretic(w: Workshop) -> Path:
    """o and down were edited in float32 and saved so, with bf16's bits; the rest is untouched."""
    tensors = {n: t.float() if ".o_proj." in n or n == "lm_head.weight" else t for n, t in w.tensors.items()}
    return w.folder("p-e-w/gpt-oss-20b-heretic", tensors, w.config)


def with_tensors(name: str, **more: torch.Tensor) -> Write:
    return lambda w: w.folder(name, w.tensors | more, w.config)


def converted(name: str, dtype: torch.dtype, *parts: str) -> Write:
    return lambda w: w.folder(
        name, {n: t.to(dtype) if n.endswith(parts) else t for n, t in w.tensors.items()}, w.config
    )


def modelopt(w: Workshop) -> Path:
    folder = w.folder("nvidia/gpt-oss-20b-mxfp4", w.tensors, w.config)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP4"}}')
    return folder


def unsloth_config(w: Workshop) -> Path:
    extra = {"unsloth_fixed": True, "unsloth_version": "2025.9.1", "pad_token_id": 0, "experts_per_token": 2}
    return w.folder("unsloth/gpt-oss-20b", w.tensors, w.config | extra)


FOLDERS: dict[str, Write] = {
    "openai": lambda w: w.openai,
    "20b's three shards": lambda w: w.folder("gpt-oss-20b", w.tensors, w.config, shard_names(3, 2, 0)),
    "120b's fifteen shards": lambda w: w.folder("gpt-oss-120b", w.tensors, w.config, shard_names(15, 14, 0)),
    "shards as transformers numbers them": lambda w: w.folder("m", w.tensors, w.config, shard_names(4, 4, 1)),
    "a snapshot in the cache": cached,
    "a repository in the cache": lambda w: cached(w).parents[1],
    "safeguard": lambda w: w.folder("openai/gpt-oss-safeguard-20b", w.tensors, w.config),
    "transformers 5": transformers5,
    "rope with type": old_rope,
    "unsloth's configuration": unsloth_config,
    "blocks without quantization_config": lambda w: w.folder("m", w.tensors, without(w.config, "quantization_config")),
    "modelopt's mxfp4": modelopt,
    "unsloth BF16": merged("unsloth/gpt-oss-20b-BF16", torch.bfloat16),
    "a merge in float16": merged("jinx-gpt-oss-20b-f16", torch.float16),
    "a merge in float32": merged("huihui-ai/gpt-oss-20b-abliterated-f32", torch.float32),
    "heretic": heretic,
    "norms in float32": converted("m", torch.float32, "norm.weight"),
    "sinks in float16": converted("m", torch.float16, "sinks"),
    "biases in float32": converted("m", torch.float32, "bias"),
    "embedding in float16": converted("m", torch.float16, "embed_tokens.weight"),
    "a value head": with_tensors("trl", **{"v_head.summary.weight": torch.ones(1, 64)}),
    "buffers of the rope": with_tensors("m", **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}),
    "scales of an fp8 cache": with_tensors("m", **{"model.layers.0.self_attn.k_scale": torch.ones(1)}),
}


# ---- GGUF files ------------------------------------------------------------------------------------------------------


def types(experts: T | None = None, o: T | None = None, qkv: T | None = None, v: T | None = None,
          embed: T | None = None, head: T | None = None) -> Callable[[str, np.ndarray], T]:  # fmt: skip
    """Which type a tensor has; None keeps what ggml-org's conversion of the model has."""
    kinds = {
        "exps.weight": experts, "attn_output.weight": o, "attn_v.weight": v or qkv, "attn_q.weight": qkv,
        "attn_k.weight": qkv, "token_embd.weight": embed, "output.weight": head,
    }  # fmt: skip

    def kind(name: str, data: np.ndarray) -> T:
        if name.endswith("exps.weight"):
            return experts or T.MXFP4
        found = next((k for end, k in kinds.items() if name == end or name.endswith("." + end)), None)
        if found is not None:
            return found
        return T.F32 if data.dtype == np.float32 else T.BF16

    return kind


def all_dense(kind: T, **more: T) -> Callable[[str, np.ndarray], T]:
    return types(**({"o": kind, "qkv": kind, "embed": kind, "head": kind} | more))


Q4_K_M = types(o=T.Q4_K, qkv=T.Q5_0, embed=T.Q5_0, head=T.Q8_0)


def split(w: Workshop, part: int, **options: Any) -> Path:
    w.gguf("gpt-oss-120b-mxfp4.gguf", all_dense(T.Q8_0), split_max_tensors=12, **options)
    return sorted(w.root.glob("*.gguf"))[part]


def empty_first(w: Workshop) -> Path:
    return split(w, 0, small_first_shard=True)


GGUFS: dict[str, Write] = {
    "ggml-org": lambda w: w.gguf("gpt-oss-20b-mxfp4.gguf", all_dense(T.Q8_0)),
    "ggml-org, three parts": lambda w: split(w, 0),
    "ggml-org, the second part": lambda w: split(w, 1),
    "ggml-org, the last part": lambda w: split(w, -1),
    "a first part without tensors": empty_first,
    "a first part without tensors, the second": lambda w: split(w, 1, small_first_shard=True),
    "a folder with a split model": lambda w: split(w, 0).parent,
    "a folder with one file": lambda w: w.gguf("gpt-oss-20b-mxfp4.gguf").parent,
    "a cache with one file": lambda w: w.gguf("models--ggml-org--gpt-oss/snapshots/1/gpt-oss-20b-mxfp4.gguf").parents[
        2
    ],
    "unsloth F16": lambda w: w.gguf("gpt-oss-20b-F16.gguf", all_dense(T.F16)),
    "unsloth BF16": lambda w: w.gguf("gpt-oss-20b-BF16.gguf", all_dense(T.BF16)),
    "F32": lambda w: w.gguf("gpt-oss-20b-F32.gguf", all_dense(T.F32)),
    "unsloth Q8_0": lambda w: w.gguf("gpt-oss-20b-Q8_0.gguf", all_dense(T.Q8_0)),
    "unsloth Q4_K_M": lambda w: w.gguf("gpt-oss-20b-Q4_K_M.gguf", Q4_K_M),
    "unsloth UD-Q4_K_XL": lambda w: w.gguf("gpt-oss-20b-UD-Q4_K_XL.gguf", types(o=T.Q8_0, qkv=T.BF16, head=T.Q8_0)),
    "unsloth Q4_K_S": lambda w: w.gguf("gpt-oss-20b-Q4_K_S.gguf", types(o=T.Q4_K, qkv=T.Q5_0, head=T.Q8_0)),
    "unsloth Q5_K_M": lambda w: w.gguf("gpt-oss-20b-Q5_K_M.gguf", types(o=T.Q5_K, qkv=T.Q5_1, v=T.Q8_0, head=T.Q8_0)),
    "unsloth Q6_K": lambda w: w.gguf("gpt-oss-20b-Q6_K.gguf", types(o=T.Q6_K, qkv=T.Q8_0, head=T.Q8_0)),
    "unsloth Q3_K_M": lambda w: w.gguf("gpt-oss-20b-Q3_K_M.gguf", types(o=T.Q3_K, qkv=T.Q4_0, v=T.Q5_0, head=T.Q8_0)),
    "unsloth Q2_K": lambda w: w.gguf("gpt-oss-20b-Q2_K.gguf", types(o=T.Q2_K, qkv=T.Q4_0, head=T.Q8_0)),
    "unsloth Q4_0": lambda w: w.gguf("gpt-oss-20b-Q4_0.gguf", all_dense(T.Q4_0)),
    "unsloth Q4_1": lambda w: w.gguf("gpt-oss-20b-Q4_1.gguf", all_dense(T.Q4_1)),
    "Q5_0": lambda w: w.gguf("gpt-oss-20b-Q5_0.gguf", all_dense(T.Q5_0)),
    "Q5_1": lambda w: w.gguf("gpt-oss-20b-Q5_1.gguf", all_dense(T.Q5_1)),
    "bartowski IQ4_NL": lambda w: w.gguf("openai_gpt-oss-20b-IQ4_NL.gguf", all_dense(T.IQ4_NL)),
    "bartowski IQ4_XS": lambda w: w.gguf("openai_gpt-oss-20b-IQ4_XS.gguf", types(o=T.IQ4_XS, qkv=T.IQ4_NL)),
    "bartowski bf16": lambda w: w.gguf("openai_gpt-oss-20b-bf16.gguf", all_dense(T.BF16)),
    "bartowski MXFP4_MOE": lambda w: w.gguf("openai_gpt-oss-20b-MXFP4_MOE.gguf", all_dense(T.Q8_0)),
    "experts in Q8_0": lambda w: w.gguf("gpt-oss-20b-heretic-Q8_0.gguf", all_dense(T.Q8_0, experts=T.Q8_0)),
    "experts in bf16": lambda w: w.gguf("gpt-oss-20b-abliterated-bf16.gguf", all_dense(T.BF16, experts=T.BF16)),
    "experts in Q4_1": lambda w: w.gguf("gpt-oss-20b-Q4_1.gguf", all_dense(T.Q8_0, experts=T.Q4_1)),
    "experts in Q5_0": lambda w: w.gguf("gpt-oss-20b-Q5_0.gguf", all_dense(T.Q8_0, experts=T.Q5_0)),
    "the sliding pattern as a list": lambda w: w.gguf(
        "m.gguf", keys={"gpt-oss.attention.sliding_window_pattern": [True, False]}
    ),
}
ROUNDED = {"Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q3_K_M", "Q2_K", "Q4_1", "Q5_1", "IQ4_XS"}  # to q8


# ---- what is served --------------------------------------------------------------------------------------------------


def logits(model: GptOss, tokens: list[int]) -> torch.Tensor:
    return SingleSequence(model, len(tokens)).feed(tokens, all_logits=True)


@functools.cache
def openai_model(folder: Path) -> tuple[Weights, torch.Tensor, list[int]]:
    with OpenCheckpoint(resolve_model(str(folder))) as opened:
        tokens = opened.tokenizer().encode(TEXT)
        return checkpoint.load(folder), logits(load_model(opened, EXACT_FORM), tokens), tokens


def numbers_of(file: Path, weights: Weights) -> Weights:
    """The model with the numbers that the gguf package reads in the file, and its parts, as float32."""
    paths = sorted(file.parent.glob("*-of-*.gguf")) or [file]
    tensors = {t.name: torch.from_numpy(decode(t)) for path in paths for t in gguf.GGUFReader(path).tensors}

    def layer(i: int) -> dict[str, torch.Tensor]:
        at = {name: tensors[f"blk.{i}.{name}.weight"] for name in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
        )}  # fmt: skip
        gate_up = torch.stack((at["ffn_gate_exps"], at["ffn_up_exps"]), 2).flatten(1, 2)
        return {
            "qkv": torch.cat((at["attn_q"], at["attn_k"], at["attn_v"])), "o": at["attn_output"], "gate_up": gate_up,
            "down": at["ffn_down_exps"],
        }  # fmt: skip

    layers = [replace(old, **layer(i)) for i, old in enumerate(weights.layers)]
    return replace(weights, layers=layers, embed=tensors["token_embd.weight"], lm_head=tensors["output.weight"])


def plans_on_a_gpu(path: Path) -> None:
    """There is a plan, or the flag that the failure ends with makes one."""
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        facts = opened.facts
    try:
        choose(facts.config, Gates(), ARCHES["sm90"], facts.formats)
    except PlanError as e:
        flag, _, value = str(e).splitlines()[-1].removeprefix("Use ").rstrip(".").partition(" ")
        assert flag == "--layers", str(e)
        choose(facts.config, parse({"layers": value}, env={}), ARCHES["sm90"], facts.formats)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_served(workshop: Workshop, name: str) -> None:
    path = FOLDERS[name](workshop)
    _, expected, tokens = openai_model(workshop.openai)
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        assert opened.tokenizer().encode(TEXT) == tokens
        got = logits(load_model(opened, EXACT_FORM), tokens)
    assert (got - expected).norm() / expected.norm() < 1e-5
    assert got.argmax(-1).equal(expected.argmax(-1))
    plans_on_a_gpu(path)


@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_is_served(workshop: Workshop, name: str) -> None:
    path = GGUFS[name](workshop)
    weights, _, tokens = openai_model(workshop.openai)
    file = next(iter(sorted(workshop.root.rglob("*.gguf"))))
    expected = logits(GptOss(numbers_of(file, weights), EXACT_FORM), tokens)
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        assert opened.tokenizer().encode(TEXT) == tokens
        got = logits(load_model(opened, EXACT_FORM), tokens)
    rounded = any(part in name for part in ROUNDED)
    assert (got - expected).norm() / expected.norm() < (0.02 if rounded else 1e-5)
    if not rounded:
        assert got.argmax(-1).equal(expected.argmax(-1))
    plans_on_a_gpu(path)


@pytest.mark.parametrize("experts", [3, 5, 6])
@pytest.mark.parametrize("kind", ["reap", "bf16", "gguf"])
def test_pruned_experts(workshop: Workshop, experts: int, kind: str) -> None:
    """REAP's and AmanPriyanshu's counts are no multiples of anything."""
    names = (".experts.", "router.")
    tensors = {n: t[:experts].clone() if any(p in n for p in names) else t for n, t in workshop.tensors.items()}
    config = workshop.config | {"num_local_experts": experts}
    plain = workshop.folder("reap", tensors, config)
    path = plain
    if kind == "bf16":
        path = workshop.folder("bf16", dense(tensors, torch.bfloat16), without(config, "quantization_config"))
    elif kind == "gguf":
        checkpoint.save_gguf(checkpoint.load(plain), workshop.root / "m.gguf", tokenizer=plain / "tokenizer.json")
        path = workshop.root / "m.gguf"
    got, expected = (logits(load_model(resolve_model(str(p)), EXACT_FORM), [5, 6, 7]) for p in (path, plain))
    assert (got - expected).norm() / expected.norm() < 1e-5
    plans_on_a_gpu(path)


# ---- numbers with more bits ------------------------------------------------------------------------------------------


def wider(workshop: Workshop, end: str, dtype: torch.dtype) -> Path:
    draw = torch.Generator().manual_seed(3)
    tensors = workshop.tensors
    for name in [n for n in tensors if n.endswith(end)]:
        noise = torch.randn(tensors[name].shape, generator=draw) * 2**-10
        tensors[name] = (tensors[name].float() * (1 + noise)).to(dtype)
    return workshop.folder("fine-tune", tensors, workshop.config)


@pytest.mark.parametrize(
    ("end", "dtype"),
    [
        ("router.weight", torch.float32), ("router.bias", torch.float32), ("sinks", torch.float32),
        ("sinks", torch.float16), ("layernorm.weight", torch.float32), ("q_proj.bias", torch.float16),
    ],
)  # fmt: skip
def test_vectors_and_routers_keep_their_bits(workshop: Workshop, end: str, dtype: torch.dtype) -> None:
    path = wider(workshop, end, dtype)
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        assert opened.source is not None
        wide = {role for role, form in formats_in(opened.source).items() if form == "f32"}
        weights = load_model(opened, EXACT_FORM).weights
    assert wide
    choice = choose(CONFIG, Gates(), ARCHES["sm90"], opened.facts.formats)
    assert choice.spec.wide == wide
    kernels = {name for names in choice.selection.chosen.values() for name in names}
    assert "cuda.decode_step" not in kernels
    stored = load_file(path / "model.safetensors")["model.layers.1.self_attn.sinks"].float()
    assert weights.layers[1].sinks.float().equal(stored)


def test_dense_float16_is_served_on_a_cpu_and_becomes_q8_on_a_gpu(workshop: Workshop) -> None:
    path = wider(workshop, "o_proj.weight", torch.float16)
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        assert opened.facts.formats["o"] == "f16"
        load_model(opened, EXACT_FORM)
    with pytest.raises(PlanError, match=r"Use --layers o=q8\.$"):
        choose(CONFIG, PRESETS["exact"].gates, ARCHES["sm90"], opened.facts.formats)
    assert choose(CONFIG, Gates(), ARCHES["sm90"], opened.facts.formats).spec.formats["o"] == "q8"
    plans_on_a_gpu(path)


@pytest.mark.parametrize("form", ["bf16", "q8", "f16"])
def test_other_experts_on_a_gpu(form: str) -> None:
    """They become MXFP4 unless a flag keeps them; then a kernel takes them, or the failure says which flag to use."""
    from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, formats_after

    stored = CHECKPOINT_FORMATS | {"gate_up": form, "down": form}
    sm90 = ARCHES["sm90"]
    assert choose(CONFIG, Gates(), sm90, stored).spec.formats["gate_up"] == "mxfp4"
    assert formats_after(CONFIG, Gates(), stored, ARCHES["cpu"])["gate_up"] == form
    keep = parse({"layers": "moe=checkpoint"}, env={})
    if form == "f16":
        with pytest.raises(PlanError, match=r"Use --layers moe=mxfp4\.$"):
            choose(CONFIG, keep, sm90, stored)
        return
    choice = choose(CONFIG, keep, sm90, stored)
    assert choice.spec.formats["gate_up"] == form
    assert "triton.moe" in choice.selection.chosen["decode"]


def test_a_quantised_embedding_keeps_its_precision_on_a_cpu(workshop: Workshop) -> None:
    path = workshop.gguf("m.gguf", types(embed=T.Q8_0))
    with OpenCheckpoint(resolve_model(str(path))) as opened:
        embed = load_model(opened, EXACT_FORM).weights.embed
        on_cpu, on_gpu = (opened.facts.weight_bytes(PRESETS["exact"].gates, ARCHES[name]) for name in ("cpu", "sm90"))
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    assert embed.equal(torch.from_numpy(decode(tensor)))
    assert on_cpu - on_gpu == 2 * CONFIG.vocab * CONFIG.hidden


def test_experts_that_become_mxfp4_are_announced(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the plan wants other experts than the file has, they are requantised, and a line says so."""
    from halfbyte.model import load

    path = FOLDERS["unsloth BF16"](workshop)
    weights, expected, tokens = openai_model(workshop.openai)
    as_on_gpu = choose(CONFIG, replace(EXACT_FORM, layers=Gates(layers="moe=mxfp4").layers), ARCHES["cpu"])  # type: ignore[arg-type]
    monkeypatch.setattr(load, "choose", lambda *args: as_on_gpu)
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        model = load_model(resolve_model(str(path)), EXACT_FORM, page_size=as_on_gpu.spec.page_size)
    assert model.spec.formats["gate_up"] == "mxfp4"
    assert "moe=checkpoint" in caplog.text
    assert "the experts' weights changed by 0 % (relative error): they were MXFP4 before." in caplog.text
    got = logits(model, tokens)
    assert (got - expected).norm() / expected.norm() < 1e-5  # they were MXFP4 once, and are again
    assert weights.config.experts == CONFIG.experts


def test_what_requantising_costs_is_measured(workshop: Workshop) -> None:
    """On the first expert of each layer; here all of them are equally far from MXFP4."""
    draw = torch.Generator().manual_seed(3)
    tensors = dense(workshop.tensors, torch.bfloat16)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        tensors[name] = (tensors[name].float() + 0.02 * torch.randn(tensors[name].shape, generator=draw)).bfloat16()
    path = workshop.folder("merged", tensors, without(workshop.config, "quantization_config"))
    before, after = checkpoint.load(path), checkpoint.load(path, layer_formats={"moe": "mxfp4"})
    assert before.expert_error is None
    lost = size = 0.0
    for old, new in zip(before.layers, after.layers):
        for role in ("gate_up", "down"):
            exact, rounded = (ops_dense(getattr(layer, role)) for layer in (old, new))
            lost, size = lost + float((rounded - exact).norm()) ** 2, size + float(exact.norm()) ** 2
    assert after.expert_error == pytest.approx((lost / size) ** 0.5, rel=0.1)
    assert 0.05 < float(after.expert_error or 0) < 0.12
    assert checkpoint.load(workshop.openai, layer_formats={"moe": "mxfp4"}).expert_error is None


class LayerFormats(Exception):
    """The formats that a model would have been loaded in."""


@pytest.mark.parametrize(("dense", "expected"), [(T.BF16, "q8"), (T.Q8_0, "checkpoint")])
def test_the_default_on_a_gpu_loads_unquantised_dense_layers_as_q8(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, dense: T, expected: str
) -> None:
    from halfbyte.model import load

    def read(*_: object, layer_formats: dict[str, str], **__: object) -> None:
        raise LayerFormats(layer_formats)

    path = workshop.gguf("m.gguf", types(qkv=dense, o=dense, head=dense))
    monkeypatch.setattr(load, "arch_of", lambda _: ARCHES["sm121"])
    monkeypatch.setattr(load.tests, "ensure", lambda *_: None)
    monkeypatch.setattr(load, "Compilation", lambda *_: None)
    monkeypatch.setattr(load.checkpoint, "load", read)
    for gates, form in ((None, expected), (PRESETS["exact"].gates, "checkpoint")):
        with pytest.raises(LayerFormats) as caught:
            load_model(resolve_model(str(path)), gates)
        assert [caught.value.args[0][group] for group in ("qkv", "o", "lm_head")] == [form] * 3


# ---- what is refused -------------------------------------------------------------------------------------------------


def quantised(config: dict[str, Any], **more: Any) -> Write:
    return lambda w: w.folder("m", w.tensors, w.config | {"quantization_config": config} | more)


def original(w: Workshop) -> Path:
    parent = w.folder("gpt-oss-20b", w.tensors, w.config)
    (parent / "original").mkdir()
    own = {"num_hidden_layers": 2, "num_experts": 8, "experts_per_token": 2, "swiglu_limit": 7.0, "hidden_size": 64}
    (parent / "original" / "config.json").write_text(json.dumps(own))
    (parent / "original" / "dtypes.json").write_text("{}")
    save_file({"block.0.attn.norm.scale": torch.ones(64)}, parent / "original" / "model.safetensors")
    return parent / "original"


def adapter(w: Workshop, config: bool = False) -> Path:
    folder = w.root / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "openai/gpt-oss-20b", "r": 8}'
    )
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")
    if config:
        shutil.copy(w.openai / "config.json", folder)
    return folder


def linears(w: Workshop) -> Path:
    tensors = {n: t for n, t in w.tensors.items() if ".experts." not in n}
    for layer in range(2):
        for e in range(8):
            base = f"model.layers.{layer}.mlp.experts"
            tensors[f"{base}.gate_up_projs.{e}.weight"] = torch.ones(128, 64)
            tensors[f"{base}.down_projs.{e}.weight"] = torch.ones(64, 64)
    return w.folder("unsloth/gpt-oss-20b-linears", tensors, without(w.config, "quantization_config"))


def pickled(w: Workshop) -> Path:
    folder = w.folder("m", None, w.config)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return folder


def missing_part(w: Workshop, part: int) -> Path:
    split(w, part).unlink()
    return sorted(w.root.glob("*.gguf"))[0]


def pointer(w: Workshop) -> Path:
    folder = w.folder("m", None, w.config)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


def several(w: Workshop) -> Path:
    for name in ("gpt-oss-20b-F16.gguf", "gpt-oss-20b-Q8_0.gguf"):
        shutil.copy(w.ggml, w.root / name)
    return w.root


def two_snapshots(w: Workshop) -> Path:
    snapshot = cached(w)
    shutil.copytree(snapshot, snapshot.with_name("f" * 40), symlinks=True)
    return snapshot.parents[1]


def eagle(w: Workshop) -> Path:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64}
    return w.folder("nvidia/gpt-oss-120b-Eagle3", {"fc.weight": torch.ones(2, 2)}, config)


REFUSED: dict[str, tuple[Write, tuple[str, ...]]] = {
    "mlx": (
        lambda w: w.folder("mlx-community/gpt-oss-20b-MXFP4-Q8", w.tensors, without(
            w.config, "quantization_config", quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"})),
        ("MLX", "32"),
    ),
    "mlx, both keys": (quantised({"group_size": 64, "bits": 8}, quantization={"group_size": 64, "bits": 8}), ("MLX",)),
    "original/": (original, ("original/", "gpt-oss-20b")),
    "lora": (adapter, ("LoRA adapter", "openai/gpt-oss-20b", "merge")),
    "lora with a configuration": (lambda w: adapter(w, config=True), ("LoRA adapter", "merge")),
    "experts as linears": (linears, ("Linear", "merged_16bit")),
    "unsloth bnb 4bit": (quantised({"quant_method": "bitsandbytes", "load_in_4bit": True}), ("bitsandbytes",)),
    "nvfp4": (quantised({"quant_method": "modelopt", "quant_algo": "NVFP4"}), ("modelopt",)),
    "quark": (quantised({"quant_method": "quark"}), ("quark",)),
    "awq": (quantised({"quant_method": "compressed-tensors", "format": "pack-quantized"}), ("compressed-tensors",)),
    "gptq": (quantised({"quant_method": "gptq", "bits": 8, "group_size": 128}), ("gptq",)),
    "ollama": (lambda w: w.gguf("m.gguf", arch="gptoss"), ("Ollama", "llama.cpp")),
    "another architecture": (lambda w: w.gguf("m.gguf", arch="llama"), ("llama", "gpt-oss")),
    "a tied head": (lambda w: w.folder("m", w.tensors, w.config | {"tie_word_embeddings": True}), ("tie",)),
    "code of its own": (lambda w: w.folder("m", w.tensors, w.config | {"auto_map": {"a": "b"}}), ("never runs",)),
    "no window": (lambda w: w.folder("m", w.tensors, w.config | {"sliding_window": None}), ("window",)),
    "experts that differ by layer": (
        lambda w: w.folder("m", w.tensors, w.config | {"per_layer_config": [1]}), ("per_layer_config",),
    ),
    "one expert too few": (
        lambda w: w.folder("m", w.tensors, w.config | {"num_local_experts": 6}), ("shape", "config.json"),
    ),
    "REAP with the old count": (lambda w: w.gguf("m.gguf", keys={"gpt-oss.expert_count": 6}), ("shape", "metadata")),
    "fused gate and up": (
        lambda w: w.gguf("m.gguf", extra={"blk.0.ffn_gate_up_exps.weight": np.ones((1, 32), np.float32)}),
        ("ffn_gate_up_exps", "not part"),
    ),
    "ternary": (lambda w: w.gguf("m.gguf", types(o=T.TQ2_0)), ("TQ2_0", "Q8_0")),
    "a pattern for other layers": (
        lambda w: w.gguf("m.gguf", keys={"gpt-oss.attention.sliding_window_pattern": [True]}), ("another network",),
    ),
    "a pattern of three": (
        lambda w: w.gguf("m.gguf", keys={"gpt-oss.attention.sliding_window_pattern": 3}), ("another network",),
    ),
    "several files": (several, ("give one", "gpt-oss-20b-F16.gguf")),
    "several snapshots": (two_snapshots, ("2 snapshots",)),
    "a missing part": (lambda w: missing_part(w, 1), ("needs all", "00002")),
    "a missing first part": (lambda w: missing_part(w, 0), ("needs all", "00001")),
    "a shard": (lambda w: w.openai / "model.safetensors", ("give the folder",)),
    "pickled": (pickled, ("unpickle", "safetensors")),
    "a pointer": (pointer, ("git lfs pull",)),
    "a head for speculation": (eagle, ("llama", "gpt_oss")),
    "an empty folder": (lambda w: w.root, ("does not exist", ".gguf")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_one_sentence_that_leads_on(workshop: Workshop, name: str) -> None:
    write, words = REFUSED[name]
    path = write(workshop)
    with pytest.raises(CheckpointError) as caught, OpenCheckpoint(resolve_model(str(path))):
        pass
    assert problem_of(caught.value) is None
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_sixty_layouts() -> None:
    assert len(FOLDERS) + len(GGUFS) + len(REFUSED) >= 60
