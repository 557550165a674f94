"""Variables and `vllm serve` flags of older MXFP4-on-vLLM stacks, with the present equivalent of each.

Every name is accepted, passed on to vLLM, or refused with its equivalent; none is dropped silently. Accepted flags
become values of our gates (`halfbyte.gates`) or arguments for vLLM (`launch.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.gates import AXES, Gates, parse

# Read by FlashInfer, torch, NCCL or the tokenizer.
HANDED_ON = {
    "FLASHINFER_CUDA_ARCH_LIST": "architectures that FlashInfer compiles for (12.1a for GB10)",
    "FLASHINFER_NVCC_THREADS": "threads of one nvcc",
    "FLASHINFER_LOGLEVEL": "FlashInfer's log",
    "FLASHINFER_LOGDEST": "where it goes",
    "FLASHINFER_JIT_VERBOSE": "what FlashInfer compiles",
    "FLASHINFER_JIT_DEBUG": "debug builds of it",
    "MAX_JOBS": "compilers that run at once; each takes gigabytes",
    "NCCL_DEBUG": "NCCL's log",
    "CUDA_LAUNCH_BLOCKING": "every launch waits: for finding a fault",
    "TORCH_SHOW_CPP_STACKTRACES": "for finding a fault",
    "TIKTOKEN_ENCODINGS_BASE": "folder of the vocabulary; halfbyte brings its own",
}
# Old name -> present name.
RENAMED = {"NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
# Read as gates, by `halfbyte.gates`.
GATES = {name: axis.flag for axis in AXES for name in axis.variables if not name.startswith("HALFBYTE_")}

ATTENTION = {"triton": "TRITON_ATTN", "flashinfer": "FLASHINFER", "flash_attn": "FLASH_ATTN"}
KV_CACHE = {"bf16": "bfloat16", "fp8": "fp8"}
# vLLM's names of the MoE kernels that are gates of ours, too.
MOE_BACKENDS = {"marlin": "marlin", "cutlass": "flashinfer_cutlass"}
SPECULATION = ("ngram", "suffix", "eagle3", "draft_model")

# Flags of `vllm serve` whose meaning has not changed. Value: whether the flag takes a value.
UNCHANGED = {
    "--host": True,
    "--port": True,
    "--served-model-name": True,
    "--tensor-parallel-size": True,
    "-tp": True,
    "--gpu-memory-utilization": True,
    "--max-model-len": True,
    "--max-num-seqs": True,
    "--max-num-batched-tokens": True,
    "--load-format": True,
    "--tool-call-parser": True,
    "--reasoning-parser": True,
    "--enable-prefix-caching": False,
    "--async-scheduling": False,
    "--enable-auto-tool-choice": False,
}


def renamed_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Renamed variables that are set, under their present names."""
    return {new: env[old] for old, new in RENAMED.items() if old in env and new not in env}


@dataclass
class ParsedArguments:
    """The user's arguments for vLLM, split into gates and the rest."""

    arguments: list[str] = field(default_factory=list)  # passed on to vLLM
    gates: dict[str, str] = field(default_factory=dict)  # field -> value of a flag that is a gate
    model: str | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def value_of(self, *flags: str) -> str | None:
        """The value of a flag that is passed on to vLLM; None if it is absent."""
        for i, word in enumerate(self.arguments[:-1]):
            if word in flags:
                return self.arguments[i + 1]
        return None


def read_arguments(arguments: Sequence[str]) -> ParsedArguments:
    """Parse the arguments of `vllm serve`, older names included."""
    parsed = ParsedArguments()
    for flag, value in _pairs(arguments):
        if not flag.startswith("-"):
            if parsed.model is None and value is None:
                parsed.model = flag
            else:
                parsed.arguments.append(flag)
            continue
        handler = _HANDLERS.get(flag.partition(".")[0])
        if handler is not None:
            handler(parsed, flag, value)
        else:
            parsed.arguments += [flag] if value is None else [flag, value]
    return parsed


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) pairs; a positional argument comes as (argument, None)."""
    rest = list(arguments)
    if rest[:2] == ["vllm", "serve"]:
        rest = rest[2:]
    while rest:
        argument = rest.pop(0)
        name, sign, value = argument.partition("=")
        if argument.startswith("-") and sign:
            yield name, value
        elif argument.startswith("-") and argument not in _SWITCHES and rest and not rest[0].startswith("-"):
            yield argument, rest.pop(0)
        else:
            yield argument, None


_SWITCHES = {"--enforce-eager", "--headless", *(flag for flag, takes in UNCHANGED.items() if not takes)}


def _model(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    parsed.model = value


def _quantization(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    if value in ("mxfp4", "gpt_oss_mxfp4"):
        parsed.notes.append(f"{flag} {value} is ignored: the format is read from the gpt-oss checkpoint.")
    else:
        parsed.refusals.append(f"{flag} {value} is not gpt-oss's format, MXFP4; remove the flag.")


def _layers(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    parsed.gates["layers"] = value or ""


def _eager(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    parsed.gates["graphs"] = "off"


def _attention_backend(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    names = {vllm_name: name for name, vllm_name in ATTENTION.items()}
    if (value or "").upper() in names:
        parsed.gates["attention"] = names[(value or "").upper()]
    else:
        parsed.arguments += [flag, value or ""]


def _attention_config(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    """--attention-config as JSON, or one key of it as --attention-config.backend=NAME."""
    _, dot, key = flag.partition(".")
    if dot:
        if key == "backend":
            _attention_backend(parsed, flag, value)
        else:
            parsed.arguments += [f"{flag}={value}"]
        return
    config = _json(parsed, flag, value)
    if config is None:
        return
    backend = config.pop("backend", None)
    if isinstance(backend, str):
        _attention_backend(parsed, f"{flag}.backend", backend)
    for key, part in config.items():
        parsed.arguments.append(f"{flag}.{key}={part if isinstance(part, str) else json.dumps(part)}")


def _kv_cache(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    names = {vllm_name: name for name, vllm_name in KV_CACHE.items()} | {"fp8_e4m3": "fp8", "auto": "auto"}
    if value in names:
        parsed.gates["kv_dtype"] = names[value]
    else:
        parsed.refusals.append(f"{flag} {value} is not supported; use --kv-dtype bf16 or fp8.")


def _moe_backend(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    names = {vllm_name: gate_value for gate_value, vllm_name in MOE_BACKENDS.items()}
    name = (value or "").lower().replace("-", "_")
    if name in names:
        parsed.gates["moe_kernel"] = names[name]
    elif name != "auto":
        parsed.gates["moe_kernel"] = "vllm"
        parsed.arguments += [flag, name]


def _speculation(parsed: ParsedArguments, flag: str, value: str | None) -> None:
    _, dot, key = flag.partition(".")
    if dot:
        method = value if key == "method" else None
        parsed.arguments.append(f"{flag}={value}")
    else:
        config = _json(parsed, flag, value)
        if config is None:
            return
        method = config.get("method")
        parsed.arguments += [flag, json.dumps(config)]
    if method is not None and method not in SPECULATION:
        parsed.refusals.append(f"{flag} names the method {method!r}; gpt-oss has {', '.join(SPECULATION)}.")


def _json(parsed: ParsedArguments, flag: str, value: str | None) -> dict[str, Any] | None:
    try:
        config = json.loads(value or "")
    except ValueError:
        config = None
    if isinstance(config, dict):
        return config
    parsed.refusals.append(f'{flag} {value or ""} is not a JSON object; write it as \'{{"key": "value"}}\'.')
    return None


_HANDLERS = {
    "--model": _model,
    "--quantization": _quantization,
    "-q": _quantization,
    "--mxfp4-layers": _layers,
    "--enforce-eager": _eager,
    "--attention-backend": _attention_backend,
    "--attention-config": _attention_config,
    "--kv-cache-dtype": _kv_cache,
    "--moe-backend": _moe_backend,
    "--speculative-config": _speculation,
}

# Every flag of `vllm serve` that older stacks used.
FLAGS = (*UNCHANGED, *_HANDLERS)


def conflicts(gates: Gates, values: Mapping[str, str], base: Gates) -> list[str]:
    """Messages about vLLM flags that contradict a gate the user set."""
    flags = {axis.field: axis.flag for axis in AXES}
    mine, default = gates.as_dict(), base.as_dict()
    out = []
    for name, value in values.items():
        gate_value = parse({name: value}, env={}).as_dict()[name]
        if mine[name] not in (default[name], gate_value):
            out.append(f"a vLLM flag sets {value}, but {flags[name]} is {mine[name]}; use only one of them.")
    return out
