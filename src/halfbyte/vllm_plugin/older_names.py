"""Names that older MXFP4-on-vLLM stacks used, and what each is today: variables, and flags of `vllm serve`.

Every name is accepted, handed on, or refused with its equivalent; none is dropped in silence. What a name means is not
decided here: flags become values of our gates (`halfbyte.gates`) or words for vLLM (`launch.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfbyte.gates import AXES, RETIRED, Gates, parse

# Read by FlashInfer, torch, NCCL or the tokenizer, today as then.
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
# Another name today.
RENAMED = {"NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
# Read as gates, by `halfbyte.gates`.
GATES = {name: axis.flag for axis in AXES for name in axis.variables if not name.startswith("HALFBYTE_")}

ATTENTION = {"triton": "TRITON_ATTN", "flashinfer": "FLASHINFER", "flash_attn": "FLASH_ATTN"}
KV_CACHE = {"bf16": "bfloat16", "fp8": "fp8"}
# vLLM's names of the MoE kernels that are gates of ours, too.
MOE_BACKENDS = {"marlin": "marlin", "cutlass": "flashinfer_cutlass"}
SPECULATION = ("ngram", "suffix", "eagle3", "draft_model")

# Flags of `vllm serve` that older stacks used and that mean today what they meant: (flag, takes a value).
UNCHANGED = {
    "--host": True, "--port": True, "--served-model-name": True, "--tensor-parallel-size": True, "-tp": True,
    "--gpu-memory-utilization": True, "--max-model-len": True, "--max-num-seqs": True, "--max-num-batched-tokens": True,
    "--load-format": True, "--tool-call-parser": True, "--reasoning-parser": True, "--enable-prefix-caching": False,
    "--async-scheduling": False, "--enable-auto-tool-choice": False,
}  # fmt: skip


def todays_name(name: str) -> str | None:
    """What a variable of an older stack is today, in a few words; None: it was none of theirs."""
    if name in GATES:
        return f"read as {GATES[name]}"
    if name in HANDED_ON:
        return f"handed on ({HANDED_ON[name]})"
    if name in RENAMED:
        return f"handed on as {RENAMED[name]}"
    return f"refused: use {RETIRED[name]}" if name in RETIRED else None


def renamed_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables whose name is another one today, under that name."""
    return {new: env[old] for old, new in RENAMED.items() if old in env and new not in env}


@dataclass
class Read:
    """Words for vLLM as somebody typed them, taken apart."""

    words: list[str] = field(default_factory=list)  # handed on
    gates: dict[str, str] = field(default_factory=dict)  # field -> value, said by a flag
    model: str | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def value_of(self, *flags: str) -> str | None:
        """Of a flag that is handed on."""
        for i, word in enumerate(self.words[:-1]):
            if word in flags:
                return self.words[i + 1]
        return None


def read_words(words: Sequence[str]) -> Read:
    """The arguments of an older `vllm serve`, or of today's: what they say about gates, and the rest."""
    read = Read()
    for flag, value in _pairs(words):
        if not flag.startswith("-"):
            if read.model is None and value is None:
                read.model = flag
            else:
                read.words.append(flag)
            continue
        handler = _HANDLERS.get(flag.partition(".")[0])
        if handler is not None:
            handler(read, flag, value)
        else:
            read.words += [flag] if value is None else [flag, value]
    return read


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) of each; a word that belongs to no flag comes alone."""
    rest = list(words)
    if rest[:2] == ["vllm", "serve"]:
        rest = rest[2:]
    while rest:
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        if word.startswith("-") and sign:
            yield name, value
        elif word.startswith("-") and word not in _SWITCHES and rest and not rest[0].startswith("-"):
            yield word, rest.pop(0)
        else:
            yield word, None


_SWITCHES = {"--enforce-eager", "--headless", *(flag for flag, takes in UNCHANGED.items() if not takes)}


def _model(read: Read, flag: str, value: str | None) -> None:
    read.model = value


def _quantization(read: Read, flag: str, value: str | None) -> None:
    if value in ("mxfp4", "gpt_oss_mxfp4"):
        read.notes.append(f"{flag} {value} is left out: a gpt-oss checkpoint says it itself.")
    else:
        read.refusals.append(f"{flag} {value} is another format than gpt-oss's MXFP4; leave it out.")


def _layers(read: Read, flag: str, value: str | None) -> None:
    read.gates["layers"] = value or ""


def _eager(read: Read, flag: str, value: str | None) -> None:
    read.gates["graphs"] = "off"


def _attention_backend(read: Read, flag: str, value: str | None) -> None:
    names = {theirs: ours for ours, theirs in ATTENTION.items()}
    if (value or "").upper() in names:
        read.gates["attention"] = names[(value or "").upper()]
    else:
        read.words += [flag, value or ""]


def _attention_config(read: Read, flag: str, value: str | None) -> None:
    """As JSON, or one key as --attention-config.backend=NAME."""
    _, dot, key = flag.partition(".")
    if dot:
        if key == "backend":
            _attention_backend(read, flag, value)
        else:
            read.words += [f"{flag}={value}"]
        return
    given = _json(read, flag, value)
    if given is None:
        return
    backend = given.pop("backend", None)
    if isinstance(backend, str):
        _attention_backend(read, f"{flag}.backend", backend)
    for key, part in given.items():
        read.words.append(f"{flag}.{key}={part if isinstance(part, str) else json.dumps(part)}")


def _kv_cache(read: Read, flag: str, value: str | None) -> None:
    names = {theirs: ours for ours, theirs in KV_CACHE.items()} | {"fp8_e4m3": "fp8", "auto": "auto"}
    if value in names:
        read.gates["kv_dtype"] = names[value]
    else:
        read.refusals.append(f"{flag} {value}: halfbyte checks bfloat16 and fp8; use --kv-dtype bf16 or fp8.")


def _moe_backend(read: Read, flag: str, value: str | None) -> None:
    names = {theirs: ours for ours, theirs in MOE_BACKENDS.items()}
    name = (value or "").lower().replace("-", "_")
    if name in names:
        read.gates["moe_kernel"] = names[name]
    elif name != "auto":
        read.gates["moe_kernel"] = "vllm"
        read.words += [flag, name]


def _speculation(read: Read, flag: str, value: str | None) -> None:
    _, dot, key = flag.partition(".")
    if dot:
        method = value if key == "method" else None
        read.words.append(f"{flag}={value}")
    else:
        given = _json(read, flag, value)
        if given is None:
            return
        method = given.get("method")
        read.words += [flag, json.dumps(given)]
    if method is not None and method not in SPECULATION:
        read.refusals.append(f"{flag} names the method {method!r}; gpt-oss has {', '.join(SPECULATION)}.")


def _json(read: Read, flag: str, value: str | None) -> dict[str, Any] | None:
    try:
        given = json.loads(value or "")
    except ValueError:
        given = None
    if isinstance(given, dict):
        return given
    read.refusals.append(f'{flag} {value or ""} is no JSON object; write it as \'{{"key": "value"}}\'.')
    return None


_HANDLERS = {
    "--model": _model, "--quantization": _quantization, "-q": _quantization, "--mxfp4-layers": _layers,
    "--enforce-eager": _eager, "--attention-backend": _attention_backend, "--attention-config": _attention_config,
    "--kv-cache-dtype": _kv_cache, "--moe-backend": _moe_backend, "--speculative-config": _speculation,
}  # fmt: skip

# Every flag of `vllm serve` that older stacks used.
FLAGS = (*UNCHANGED, *_HANDLERS)


def conflicts(gates: Gates, said: Mapping[str, str], base: Gates) -> list[str]:
    """Flags for vLLM that say something else than a gate which somebody set."""
    flags = {axis.field: axis.flag for axis in AXES}
    mine, default = gates.as_dict(), base.as_dict()
    out = []
    for name, value in said.items():
        wanted = parse({name: value}, env={}).as_dict()[name]
        if mine[name] not in (default[name], wanted):
            out.append(f"the words for vLLM say {value} where {flags[name]} says {mine[name]}; give only one of them.")
    return out
