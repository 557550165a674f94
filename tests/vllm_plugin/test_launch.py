"""Gates and older names as vLLM's command line: each is mapped, handed on, or refused with what to use today."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import GateError, PlanError
from halfbyte.gates import AXES, PRESETS, RETIRED, Gates, PerRegime, parse
from halfbyte.vllm_plugin import older_names
from halfbyte.vllm_plugin.launch import Serving, VllmLaunch, behind_our_server, vllm_command

MODEL = "openai/gpt-oss-120b"


def value(launch: VllmLaunch, flag: str) -> str | None:
    command = list(launch.command)
    return command[command.index(flag) + 1] if flag in command else None


def ours(launch: VllmLaunch) -> Any:
    return json.loads(value(launch, "--additional-config") or "{}").get("halfbyte")


def of(**gates: Any) -> VllmLaunch:
    return vllm_command(MODEL, Gates(**gates))


def test_the_default_is_the_plugin_with_its_gates_and_nothing_else() -> None:
    launch = vllm_command(MODEL, Gates(), python="python")
    assert launch.command[:5] == ("python", "-m", "vllm.entrypoints.cli.main", "serve", MODEL)
    assert launch.command[5] == "--additional-config"
    assert ours(launch) == {"gates": {}}
    assert launch.environment == {"VLLM_PLUGINS": "halfbyte"}
    assert not launch.refusals
    assert parse(ours(launch)["gates"], env={}) == Gates()


@pytest.mark.parametrize("preset", PRESETS)
def test_gates_travel_and_come_back(preset: str) -> None:
    gates = PRESETS[preset].gates
    assert parse(ours(vllm_command(MODEL, gates))["gates"], env={}) == gates


@pytest.mark.parametrize(
    ("gates", "flag", "wanted"),
    [
        ({"moe_kernel": "marlin"}, "--moe-backend", "marlin"),
        ({"moe_kernel": "gemm"}, "--moe-backend", "flashinfer_cutlass"),
        ({"moe_kernel": "triton"}, "--moe-backend", None),
        ({"moe_kernel": "vllm"}, "--moe-backend", None),
        ({"moe_kernel": "cutlass", "activation": "mxfp8"}, "--quantization-config", '{"moe": {"activation": "mxfp8"}}'),
        ({"moe_kernel": "cuda", "activation": "mxfp8"}, "--quantization-config", None),
        ({"attention": "TRITON_ATTN"}, "--attention-config", '{"backend": "TRITON_ATTN"}'),
        ({"attention": "flashinfer"}, "--attention-config", '{"backend": "FLASHINFER"}'),
        ({"attention": "FLASH_ATTN"}, "--attention-config", '{"backend": "FLASH_ATTN"}'),
        ({"kv_dtype": "fp8"}, "--kv-cache-dtype", "fp8"),
        ({"kv_dtype": "bf16"}, "--kv-cache-dtype", "bfloat16"),
    ],
)
def test_a_gate_is_a_flag(gates: dict[str, str], flag: str, wanted: str | None) -> None:
    launch = of(**gates)
    assert value(launch, flag) == wanted
    assert not launch.refusals


def test_our_own_layers_are_asked_for_by_our_own_gates() -> None:
    """The step in one launch, and our attention: the plugin answers them, or says why not when it starts."""
    launch = of(moe_kernel="gemv", linear_kernel="gemv", attention="cuda")
    assert launch.refusals == ()
    assert "--attention-config" not in launch.command
    assert '"attention": "cuda"' in launch.command[-1]


def test_enforce_eager() -> None:
    assert "--enforce-eager" in of(graphs="off").command
    assert "--enforce-eager" not in of().command


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ({"moe_kernel": PerRegime("marlin", "cuda", "cuda")}, "one layout"),
        ({"moe_kernel": "marlin", "activation": "mxfp8"}, "Marlin takes bf16"),
        ({"moe_kernel": "cutlass", "activation": "mxfp4"}, "takes bf16 and mxfp8"),
        ({"moe_kernel": "cutlass", "activation": "long=mxfp8"}, "one format for all regimes"),
        ({"moe_kernel": "cutlass", "tile": "64x128"}, "chooses its own tiles"),
        ({"linear_kernel": "cutlass"}, "no such product"),
        ({"linear_kernel": "marlin"}, "add --mxfp4-layers"),
        ({"linear_kernel": "vllm", "layers": "qkv=mxfp4"}, "--layers qkv=mxfp4"),
        ({"layers": "moe=q8"}, "--layers moe=q8"),
        ({"attention": "reference"}, "--attention reference"),
        ({"sinks": "off"}, "garbage without sinks"),
        ({"kv_dtype": "f32"}, "bf16 or fp8"),
        ({"speculate": "eagle3"}, "--draft"),
        ({"speculate": "draft"}, "--draft"),
    ],
)
def test_what_vllm_cannot_take_is_refused_with_the_reason(gates: dict[str, Any], words: str) -> None:
    launch = of(**gates)
    assert any(words in r for r in launch.refusals), launch.refusals
    with pytest.raises(PlanError, match=re.escape(words)):
        launch.check()


def test_speculation() -> None:
    def config(**more: Any) -> Any:
        launch = vllm_command(MODEL, Gates(**{"speculate": more.pop("speculate")}), serving=Serving(**more))
        return json.loads(value(launch, "--speculative-config") or "null")

    assert config(speculate="ngram")["prompt_lookup_max"] == 5
    assert config(speculate="suffix")["method"] == "suffix"
    assert config(speculate="eagle3-short") == {
        "method": "eagle3", "num_speculative_tokens": 3, "model": "nvidia/gpt-oss-120b-Eagle3-short-context",
    }  # fmt: skip
    assert config(speculate="eagle3", draft="/heads/mine")["model"] == "/heads/mine"
    assert config(speculate="draft", draft="small")["method"] == "draft_model"
    short = vllm_command("/models/own", Gates(speculate="eagle3-long"))
    assert "--draft" in short.refusals[0]


def test_presets_of_the_comparison() -> None:
    """Every preset but one is a command of vLLM's: in its layers a group has one format."""
    assert [name for name, preset in PRESETS.items() if vllm_command(MODEL, preset.gates).refusals] == ["mixed"]
    assert value(vllm_command(MODEL, PRESETS["baseline"].gates), "--moe-backend") == "marlin"
    c = vllm_command(MODEL, PRESETS["c"].gates)
    assert {"--enforce-eager", "--speculative-config", "flashinfer_cutlass"} <= set(c.command)


def test_serving_words_and_the_typed_ones_win() -> None:
    serving = Serving(
        host="::1", port=8001, name="gpt", max_context=8192, max_seqs=2, max_tokens_per_step=8192, memory_share=0.7,
        tensor_parallel=2, load_format="fastsafetensors", record=Path("ran.json"),
    )  # fmt: skip
    launch = vllm_command(MODEL, Gates(), serving=serving, arguments=["--port", "9"])
    assert value(launch, "--port") == "9"
    assert launch.command.count("--port") == 1
    assert value(launch, "--gpu-memory-utilization") == "0.7"
    assert value(launch, "--load-format") == "fastsafetensors"
    assert ours(launch)["record"] == "ran.json"


OLDER = r"""vllm serve openai/gpt-oss-120b --host 0.0.0.0 --port 8000 --served-model-name gpt-oss-120b
 --quantization mxfp4 --tensor-parallel-size 1 --gpu-memory-utilization 0.70 --max-model-len 131072 --max-num-seqs 2
 --max-num-batched-tokens 8192 --enforce-eager --enable-prefix-caching --async-scheduling --load-format fastsafetensors
 --mxfp4-layers moe,qkv,o --attention-config '{"backend": "FLASHINFER"}' --enable-auto-tool-choice
 --tool-call-parser openai --reasoning-parser openai_gptoss
 --speculative-config '{"method": "eagle3", "model": "nvidia/gpt-oss-120b-Eagle3-short-context"}'"""


def test_an_older_command_as_it_was_typed() -> None:
    launch = vllm_command("other", Gates(), arguments=shlex.split(OLDER))
    assert not launch.refusals
    assert launch.command[4] == MODEL
    gates = parse(ours(launch)["gates"], env={})
    assert (gates.layers.qkv, gates.layers.lm_head, gates.graphs, gates.attention) == (
        "mxfp4", "checkpoint", "off", "flashinfer",
    )  # fmt: skip
    assert "--quantization" not in launch.command
    assert "--mxfp4-layers" not in launch.command
    assert value(launch, "--attention-config") == '{"backend": "FLASHINFER"}'
    for flag in ("--async-scheduling", "--enable-prefix-caching", "--enable-auto-tool-choice", "--enforce-eager"):
        assert launch.command.count(flag) == 1
    assert value(launch, "--max-model-len") == "131072"
    assert "--quantization mxfp4" in launch.notes[0]


def test_an_older_command_behind_our_own_server() -> None:
    """What vLLM's server would have been told is ours to do; where ours listens is not for vLLM to say."""
    launch = behind_our_server(vllm_command("other", Gates(), arguments=shlex.split(OLDER)))
    assert not {"--enable-auto-tool-choice", "--tool-call-parser", "openai"} & set(launch.command)
    assert [note for note in launch.notes if "--tool-call-parser" in note]
    assert {r.split()[0] for r in launch.refusals} == {"--host", "--port", "--served-model-name"}
    assert value(launch, "--max-model-len") == "131072"


@pytest.mark.parametrize(
    ("words", "gate", "wanted"),
    [
        ("--attention-backend TRITON_ATTN", "attention", "triton"),
        ("--attention-config.backend=FLASH_ATTN", "attention", "flash_attn"),
        ("--moe-backend marlin", "moe_kernel", "marlin"),
        ("--moe-backend flashinfer-cutlass", "moe_kernel", "cutlass"),
        ("--moe-backend triton", "moe_kernel", "vllm"),
        ("--kv-cache-dtype fp8", "kv_dtype", "fp8"),
        ("--mxfp4-layers all", "layers", "moe=mxfp4,qkv=mxfp4,o=mxfp4,lm_head=mxfp4"),
    ],
)
def test_flags_that_are_gates(words: str, gate: str, wanted: str) -> None:
    launch = vllm_command(MODEL, Gates(), arguments=words.split())
    assert not launch.refusals
    assert ours(launch)["gates"][gate] == wanted


def test_vllms_own_triton_kernel_is_asked_for_in_vllms_words() -> None:
    assert value(vllm_command(MODEL, Gates(), arguments=["--moe-backend", "triton"]), "--moe-backend") == "triton"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--quantization nvfp4", "--quantization nvfp4"),
        ("--mxfp4-layers moe,router", "router"),
        ("--attention-config nonsense", "nonsense is not a JSON object"),
        ('--speculative-config \'{"method": "medusa"}\'', "gpt-oss has ngram"),
        ("--speculative-config.method=mtp", "gpt-oss has ngram"),
        ("--kv-cache-dtype nvfp4", "use --kv-dtype"),
    ],
)
def test_words_that_cannot_be_are_refused(words: str, reason: str) -> None:
    refusals = vllm_command(MODEL, Gates(), arguments=shlex.split(words)).refusals
    assert any(reason in r for r in refusals), refusals


def test_a_gate_and_a_word_that_disagree() -> None:
    launch = vllm_command(MODEL, Gates(attention="flashinfer"), arguments=["--attention-backend", "TRITON_ATTN"])
    assert any("--attention is flashinfer" in r for r in launch.refusals)
    both = vllm_command(MODEL, Gates(speculate="ngram"), arguments=["--speculative-config.method=ngram"])
    assert any("--speculative-config" in r for r in both.refusals)
    same = vllm_command(MODEL, Gates(attention="flashinfer"), arguments=["--attention-backend", "FLASHINFER"])
    assert not same.refusals


# ---- variables -------------------------------------------------------------------------------------------------------

# Every variable of the stack that this project grew from.
VARIABLES = [
    "VLLM_ATTENTION_BACKEND",
    "VLLM_ATTENTION_SINKS",
    "VLLM_MXFP4_MOE_KERNEL",
    "VLLM_MXFP4_ACTIVATION",
    "FLASHINFER_MOE_TILE",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
    "VLLM_USE_FLASHINFER_MOE_FP4",
    "VLLM_FLASHINFER_MOE_BACKEND",
    "VLLM_USE_ATTENTION_SINKS",
    "VLLM_USE_CUDA_GRAPH",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_NVCC_THREADS",
    "FLASHINFER_LOGLEVEL",
    "FLASHINFER_LOGDEST",
    "FLASHINFER_JIT_VERBOSE",
    "FLASHINFER_JIT_DEBUG",
    "MAX_JOBS",
    "NCCL_DEBUG",
    "NCCL_ASYNC_ERROR_HANDLING",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TIKTOKEN_ENCODINGS_BASE",
]
FLAGS = [
    "--quantization",
    "--tensor-parallel-size",
    "--attention-config",
    "--attention-backend",
    "--speculative-config",
    "--load-format",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--enable-prefix-caching",
    "--async-scheduling",
    "--served-model-name",
    "--model",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--port",
    "--host",
    "--tool-call-parser",
    "--reasoning-parser",
    "--enable-auto-tool-choice",
    "--mxfp4-layers",
    "--enforce-eager",
]


def test_every_older_name_is_known() -> None:
    o = older_names
    assert not set(VARIABLES) - {*o.GATES, *o.HANDED_ON, *o.RENAMED, *RETIRED}
    assert not set(FLAGS) - set(o.FLAGS)


@pytest.mark.parametrize("name", RETIRED)
def test_a_variable_that_nothing_reads_refuses_the_launch(name: str) -> None:
    launch = vllm_command(MODEL, Gates(), environment={name: "1"})
    assert any(name in r and RETIRED[name] in r for r in launch.refusals)


def test_older_spellings_of_gates() -> None:
    assert parse({}, env={"VLLM_ATTENTION_SINKS": "false"}).sinks == "off"
    assert parse({}, env={"VLLM_MXFP4_MOE_KERNEL": "gemm"}).moe_kernel == PerRegime("cutlass", "cutlass", "cutlass")
    with pytest.raises(GateError, match="fewer bits; use mxfp8"):
        parse({}, env={"VLLM_MXFP4_ACTIVATION": "fp6"})


def test_a_renamed_variable_gets_its_new_name() -> None:
    launch = vllm_command(MODEL, Gates(), environment={"NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert launch.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_other_plugins_stay_allowed() -> None:
    def allowed(given: str, plugin: bool = True) -> str:
        return vllm_command(MODEL, Gates(), environment={"VLLM_PLUGINS": given}, plugin=plugin).environment[
            "VLLM_PLUGINS"
        ]

    assert allowed("lora_filesystem_resolver") == "lora_filesystem_resolver,halfbyte"
    assert allowed("halfbyte") == "halfbyte"
    assert allowed("halfbyte,other", plugin=False) == "other"


def test_vllm_alone_takes_no_gate_of_ours() -> None:
    alone = vllm_command(MODEL, PRESETS["baseline"].gates, plugin=False)
    assert not alone.refusals
    assert "--additional-config" not in alone.command
    for gates in (Gates(layers="qkv=mxfp4"), Gates(moe_kernel="cuda")):  # type: ignore[arg-type]
        assert "needs the plugin" in vllm_command(MODEL, gates, plugin=False).refusals[0]


def test_the_child_inherits_no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    for axis in AXES:
        monkeypatch.setenv(axis.variables[0], axis.values[0])
    monkeypatch.setenv("HALFBYTE_API_KEY", "secret")
    env = vllm_command(MODEL, Gates()).child_environment()
    assert env["VLLM_PLUGINS"] == "halfbyte"
    assert not {axis.variables[0] for axis in AXES} & set(env)
    assert "HALFBYTE_API_KEY" not in env


def test_a_line_for_a_terminal() -> None:
    launch = vllm_command(MODEL, Gates(attention="triton"), python="python")
    words = shlex.split(launch.shell())
    assert words[0] == "VLLM_PLUGINS=halfbyte"
    assert tuple(words[1:]) == launch.command
