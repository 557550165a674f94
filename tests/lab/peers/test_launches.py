"""Gates as each engine's own flags and variables, or a refusal with its reason. Nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.gates import AXES, parse
from halfbyte.lab.check import subject_of
from halfbyte.lab.options import CheckOptions
from halfbyte.lab.peers.asker import Question, native_body, read_native, read_reply
from halfbyte.lab.peers.engines import ENGINES, engine_named
from halfbyte.lab.peers.launch import Launch, Setup


def launch(engine: str, **flags: str) -> Launch:
    model = "file.gguf" if engine == "llamacpp" else None
    return engine_named(engine).launch(Setup(model, parse(flags, env={}), "cpu", 8123, Path("run"), ("--own", "1")))


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "llama.cpp"])
def test_the_default_starts_everywhere(engine: str) -> None:
    made = launch(engine)
    assert not made.refusals
    assert made.command[-2:] == ("--own", "1") or "--own" in made.command
    assert "8123" in made.command


@pytest.mark.parametrize("engine", ["sglang", "llamacpp", "vllm", "halfbyte"])
def test_no_gate_is_dropped_in_silence(engine: str) -> None:
    """Every value of every axis changes the command or the environment, or is refused by name."""
    if engine == "llamacpp":
        plain = Launch()
    else:
        plain = launch(engine)
    for axis in AXES:
        for value in axis.values:
            changes = parse({axis.field: value}, env={}).changes()
            if not changes or value == "auto":
                continue
            if axis.field == "cpu_instructions" and engine == "halfbyte":
                continue  # asking compiles them
            if engine == "llamacpp" and (
                axis.field in ("kv_dtype", "graphs", "threads") or (axis.field, value) in SAME
            ):
                continue  # these become flags, or need none, beside a file that is not there
            made = launch(engine, **{axis.field: value})
            assert (
                made.refusals
                or (made.command, made.environment) != (plain.command, plain.environment)
                or (engine in ("sglang", "vllm") and (axis.field, value) in SAME)
            ), f"{engine} drops {axis.flag} {value}"


# What these engines do anyway, so that no flag is needed.
SAME = {
    ("activation", "bf16"),
    ("activation", "float"),
    ("layers", "checkpoint"),
    ("sinks", "on"),
    ("moe_kernel", "vllm"),
    ("linear_kernel", "vllm"),
}


def test_sglang() -> None:
    made = launch(
        "sglang", moe_kernel="triton", attention="flash_attn", kv_dtype="fp8", graphs="off", speculate="ngram"
    )
    words = " ".join(made.command)
    assert "-m sglang.launch_server --model-path" in words
    for flag in ("--moe-runner-backend triton_kernel", "--attention-backend fa3", "--kv-cache-dtype fp8_e4m3",
                 "--cuda-graph-backend-decode disabled", "--speculative-algorithm NGRAM"):  # fmt: skip
        assert flag in words
    assert "SGLang has triton, flash_attn" in launch("sglang", attention="flashinfer").refusals[0]
    assert "one for all regimes" in launch("sglang", moe_kernel="decode=triton").refusals[0]
    assert "no such choice" in launch("sglang", layers="q8").refusals[0]


def test_vllm_alone_and_with_the_plugin() -> None:
    alone, ours = launch("vllm", moe_kernel="marlin"), launch("vllm+halfbyte", moe_kernel="triton")
    assert "--moe-backend" in alone.command
    assert alone.record is None
    assert ours.record == Path("run/kernels.json")
    assert "needs the plugin" in launch("vllm", layers="qkv=q8").refusals[0]
    assert "Hub" in engine_named("vllm").launch(Setup("random:20b")).refusals[0]


def test_a_vllm_whose_package_has_another_name_is_started_by_its_older_entry() -> None:
    """This environment has no package `vllm` at all, as a CPU build's has not."""
    peer = engine_named("vllm")
    setup = peer.prepare(Setup(None, device="cpu", port=8123), lambda _: None)
    words = " ".join(peer.launch(setup).command)
    assert f"-m vllm.entrypoints.openai.api_server --model {setup.file}" in words
    assert " serve " not in words
    with pytest.raises(UsageError, match="--engine-python names an interpreter"):
        peer.prepare(Setup(None, python="/no/such/python"), lambda _: None)


def test_vllm_on_a_cpu_is_given_a_part_of_the_memory() -> None:
    """By itself it takes nearly all, and level 5 runs two."""
    peer, said = engine_named("vllm+halfbyte"), list[str]()
    size = peer.prepare(Setup(None, device="cpu"), said.append).environment["VLLM_CPU_KVCACHE_SPACE"]
    assert 1 <= int(size) <= 4
    assert size in said[0]
    own = peer.prepare(Setup(None, device="cpu", environment={"VLLM_CPU_KVCACHE_SPACE": "9"}), said.append)
    assert own.environment["VLLM_CPU_KVCACHE_SPACE"] == "9"
    named = peer.prepare(Setup(None, device="cpu", flags=("--gpu-memory-utilization=0.2",)), said.append)
    assert not named.environment


def test_what_vllm_cannot_do_on_a_cpu_is_refused_without_a_start() -> None:
    for engine in ("vllm", "vllm+halfbyte"):
        assert "one attention for CPUs" in launch(engine, attention="triton").refusals[0]
    for changes in ({"moe_kernel": "cuda"}, {"moe_kernel": "marlin"}, {"linear_kernel": "triton"}):
        assert "no kernel on cpu can run" in launch("vllm+halfbyte", **changes).refusals[0]
    for changes in ({}, {"moe_kernel": "cpu"}, {"layers": "all"}, {"kv_dtype": "fp8"}):
        assert not launch("vllm+halfbyte", **changes).refusals


def test_gates_that_are_one_command_are_one_configuration(tmp_path: Path) -> None:
    """vLLM alone has nothing that tells --activation float from auto; the plugin has."""
    engines = {
        name: subject_of(CheckOptions(engine=name, device="cpu", out=tmp_path), lambda _: None)
        for name in ("vllm", "vllm+halfbyte", "halfbyte")
    }
    assert [s.gates == s.baseline for s in engines.values()] == [True, False, False]


def test_llamacpp_refuses_kernels_and_reads_gguf() -> None:
    assert "chooses its kernels itself" in launch("llamacpp", moe_kernel="triton").refusals[0]
    assert "in the file" in launch("llamacpp", layers="q8").refusals[0]
    assert "llama.cpp has f32, bf16" in launch("llamacpp", kv_dtype="fp8").refusals[0]


def test_llamacpp_wants_a_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from halfbyte.lab.peers import llamacpp, llamacpp_server

    monkeypatch.setattr(llamacpp, "build", lambda progress: tmp_path)
    with pytest.raises(UsageError, match="halfbyte quantize"):
        llamacpp_server.LlamaCppPeer().prepare(Setup("random:20b"), lambda _: None)
    file = tmp_path / "tiny.gguf"
    monkeypatch.setattr(llamacpp_server.shared_weights, "write", lambda model, progress: file)
    made = llamacpp_server.LlamaCppPeer().prepare(Setup(None), lambda _: None)
    assert (made.model, made.file) == (None, str(file))
    gates = parse({"threads": "2", "kv_dtype": "bf16", "graphs": "off"}, env={})
    command = llamacpp_server.LlamaCppPeer().launch(Setup(None, gates, "cpu", 8123, file=str(file)))
    assert str(file) in command.command
    words = " ".join(command.command)
    assert "-t 2" in words
    assert "-ctk bf16 -ctv bf16" in words
    assert "-ngl 0" in words
    assert command.environment == {"GGML_CUDA_DISABLE_GRAPHS": "1"}
    assert command.dialect == "llama.cpp"


def test_two_dialects_ask_and_answer_alike() -> None:
    question = Question([1, 2, 3], tokens=4, seed=7, logprobs=2, exactly=True)
    body = native_body(question)
    assert (body["n_predict"], body["prompt"], body["n_probs"], body["ignore_eos"]) == (4, [1, 2, 3], 3, True)
    theirs = {
        "content": " ab", "tokens": [5, 6], "tokens_evaluated": 3, "tokens_predicted": 2, "stop_type": "limit",
        "completion_probabilities": [
            {"token": " a", "logprob": -0.1, "top_logprobs": [{"token": " a", "logprob": -0.1}]}
        ],
    }  # fmt: skip
    usual = {
        "choices": [{"text": " ab", "token_ids": [5, 6], "finish_reason": "length", "logprobs": {
            "tokens": [" a"], "token_logprobs": [-0.1], "top_logprobs": [{" a": -0.1}]}}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }  # fmt: skip
    assert read_native(theirs, 1.0) == read_reply(usual, 1.0)
