"""The doctor on a damaged model: layers, numbers, zeros, control tokens, shards and the context, each with a fix."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte.doctor.diagnosis import diagnose
from halfbyte.doctor.finding import Finding, Purpose
from halfbyte.doctor.live import ANSWERS
from halfbyte.doctor.machine import Machine, read_records
from halfbyte.model.checkpoint import load, save_gguf
from halfbyte.model.file_check import check_files
from halfbyte.model.load import EMBEDDED

HEALTHY = Path(__file__).parent / "fixtures" / "gb10-healthy.json"
ABOUT_FILES = ("model.complete", "model.headers", "model.weights", "model.vocabulary", "model.context")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


def findings(folder: Path, *, in_process: bool = True, **purpose: Any) -> list[Finding]:
    """A healthy machine with this model on its disk."""
    machine = read_records(HEALTHY)[0]
    source = machine.source

    def answer(kind: str, name: str) -> Any:
        if kind == "model_contents" and in_process:
            return check_files(name, 600)
        return ANSWERS[kind](name) if kind in ("model", "model_contents") else source(kind, name)

    every = diagnose(Machine(answer), Purpose(str(folder), **purpose))
    return [f for f in every if f.id in ABOUT_FILES]


def one(folder: Path, id: str, *words: str, **purpose: Any) -> None:
    (finding,) = findings(folder, **purpose)
    assert (finding.id, finding.severity) == (id, "error"), finding
    assert finding.fix
    for word in words:
        assert word in finding.evidence


def change(folder: Path, values: Callable[[dict[str, Tensor]], object]) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    values(tensors)
    save_file(tensors, path)


def test_a_sound_model() -> None:
    assert findings(EMBEDDED, in_process=False, max_context=8192) == []


def test_a_missing_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"] + 1
    config |= {"num_hidden_layers": layers, "layer_types": [*config["layer_types"], "sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    one(folder, "model.headers", f"model.layers.{layers - 1}.")


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "1 value that is not finite"), (0.0, "is all zeros")], ids=["nan", "zeros"]
)
def test_weights(folder: Path, value: float, words: str) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"

    def damage(tensors: dict[str, Tensor]) -> None:
        if value == 0:
            tensors[name].zero_()
        else:
            tensors[name].view(-1)[7] = value

    change(folder, damage)
    one(folder, "model.weights", name, words)


def test_missing_control_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    for token in raw["added_tokens"]:
        if token["content"] == "<|start|>":
            token["content"] = "<|begin|>"
    path.write_text(json.dumps(raw))
    one(folder, "model.vocabulary", "<|start|>")


def test_a_vocabulary_that_cannot_be_used(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    one(folder, "model.vocabulary", "tokenizer.json")


def test_shards_that_are_missing_or_cut(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    one(folder, "model.complete", "truncated", shard.name)
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shard.unlink()
    one(folder, "model.complete", "missing", "model-00001-of-00001.safetensors")


def test_a_context_above_the_model_s(folder: Path) -> None:
    one(folder, "model.context", "32769", "32768", max_context=32769)


def test_a_scan_that_runs_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = check_files(str(EMBEDDED), 0)
    assert answer["scanned"] < answer["bytes"]
    assert answer["weights"] == []
    monkeypatch.setattr(f"{__name__}.check_files", lambda *_: answer)
    assert [(f.id, f.severity) for f in findings(EMBEDDED)] == [("model.weights", "note")]


def test_an_answer_that_is_an_error_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.check_files", lambda *_: {"error": "no torch"})
    assert [(f.id, f.severity) for f in findings(folder)] == [("model.headers", "warning")]


# ---- folders that mean something else --------------------------------------------------------------------------------


def test_a_folder_with_a_gguf_is_that_model(tmp_path: Path) -> None:
    save_gguf(load(EMBEDDED), tmp_path / "model.gguf", tokenizer=EMBEDDED / "tokenizer.json")
    assert findings(tmp_path) == []


def test_what_is_no_model_is_named_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "openai/gpt-oss-20b"}')
    (tmp_path / "lora" / "adapter_model.safetensors").touch()
    (folder / "original").mkdir()
    own = {"num_hidden_layers": 2, "num_experts": 8, "experts_per_token": 2, "swiglu_limit": 7.0}
    (folder / "original" / "config.json").write_text(json.dumps(own))
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization"] = {"group_size": 64, "bits": 4}
    del raw["quantization_config"]
    cases = (
        (tmp_path / "lora", "LoRA adapter", "merge"), (tmp_path / "empty", "config.json", ".gguf"),
        (folder / "original", "OpenAI's own layout", "give the folder above"), (folder, "MLX", "get the model"),
    )  # fmt: skip
    (tmp_path / "empty").mkdir()
    for path, word, fix in cases:
        if path == folder:
            (folder / "config.json").write_text(json.dumps(raw))
        found = [f for f in findings(path) if f.severity == "error"]
        assert [f.id for f in found] == ["model.headers"], found
        assert word in found[0].evidence
        assert fix in found[0].fix
        assert found[0].commands == ()
