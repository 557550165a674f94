"""Prefixes of a real model on a CPU: the options, the identity, and tokens equal to cold after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli import conversation
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.prefix_identity import prefix_identity
from halfbyte.engine.request import Request, SamplingParams, Usage
from halfbyte.errors import UsageError
from halfbyte.gates import Gates, parse
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.load import EMBEDDED, load_model, resolve_model, tokenizer_of
from halfbyte.model.tokenizer import Tokenizer

PROMPT = [random.Random(0).randrange(10, 900) for _ in range(300)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> GptOss:
    return load_model(resolve_model("random:small"), Gates())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(resolve_model("random:small"))


def core_of(model: GptOss, tokenizer: Tokenizer, **options: Any) -> EngineCore:
    settings = EngineOptions(kv_gib=0.05, max_seqs=4, max_context=512, **options)
    return core_for(model, tokenizer, settings, "random:small")[0]


def answer(core: EngineCore, prompt: list[int]) -> tuple[list[int], Usage]:
    core.submit(Request(prompt, GREEDY))
    tokens: list[int] = []
    usage = Usage()
    while core.has_work:
        for _, delta in core.step():
            assert delta.error is None
            tokens += delta.tokens
            usage = delta.usage or usage
    return tokens, usage


def test_tokens_after_a_restart_are_those_of_a_cold_start(model: GptOss, tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = core_of(model, tokenizer)
    assert plain.tiers is None
    cold, _ = answer(plain, PROMPT)
    first = core_of(model, tokenizer, prefix_folder=str(tmp_path / "p"))
    assert answer(first, PROMPT)[0] == cold
    first.close()
    second = core_of(model, tokenizer, prefix_folder=str(tmp_path / "p"), prefix_memory=1 << 24)
    tokens, usage = answer(second, PROMPT)
    assert tokens == cold
    assert (usage.cached_tokens, usage.disk_tokens) == (256, 256)
    anew = second.anew()
    tokens, usage = answer(anew, PROMPT)
    assert tokens == cold
    assert (usage.cached_tokens, usage.memory_tokens + usage.disk_tokens) == (256, 256), "the tiers outlive the pages"
    anew.close()


def test_another_plan_finds_nothing(model: GptOss, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = core_of(model, tokenizer, prefix_folder=str(tmp_path / "p"))
    answer(first, PROMPT)
    first.close()
    other = load_model(resolve_model("random:small"), parse({"activation": "f32"}, env={}))
    second = core_of(other, tokenizer, prefix_folder=str(tmp_path / "p"))
    assert answer(second, PROMPT)[1].cached_tokens == 0
    assert second.stats().prefix_disk_bytes > 0
    second.close()


def test_an_identity_is_the_content_s_and_not_the_path_s(model: GptOss, tmp_path: Path) -> None:
    model.allocate_kv(4)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in EMBEDDED.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    here = prefix_identity(model, EMBEDDED, "tiny")
    assert prefix_identity(model, copy, "another name") == here
    assert prefix_identity(model, EMBEDDED, "tiny", "a head") != here
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert prefix_identity(model, copy, "tiny") != here


def test_a_model_of_unknown_content_has_no_folder(model: GptOss, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--prefix-folder"):
        core_for(model, tokenizer, EngineOptions(kv_gib=0.05, prefix_folder=str(tmp_path / "p")), "some weights")


def test_without_a_prefix_cache_nothing_is_stored(model: GptOss, tokenizer: Tokenizer, tmp_path: Path) -> None:
    core = core_of(model, tokenizer, prefix_cache=False, prefix_folder=str(tmp_path / "p"), prefix_memory=1 << 24)
    assert core.tiers is None
    assert not (tmp_path / "p").exists()


def test_the_folder_is_suggested_once_and_to_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversation, "cache_folder", lambda name: tmp_path / name)
    conversation.suggest_prefix_folder()
    assert "--prefix-folder" not in capsys.readouterr().err, "it goes to a file"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    printed: list[str] = []
    monkeypatch.setattr(conversation.err, "print", printed.append)
    conversation.suggest_prefix_folder()
    conversation.suggest_prefix_folder()
    assert len(printed) == 1
    assert "--prefix-folder DIR" in printed[0]
