"""How vLLM is started for our gates: the one mapping from gates, and from older stacks' names, to vLLM's flags.

Needs no vLLM. A value that vLLM cannot take is a refusal with its reason, and a `Launch` that has one is not run. Gates
that our plugin answers travel in `--additional-config`, which vLLM hands to every process and counts into the key of
its compile cache. Nothing here starts a process or looks at a GPU.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import GateError, PlanError
from halfbyte.gates import ACTIVATION_REGIMES, AXES, RETIRED, Gates, child_environment, parse
from halfbyte.vllm_plugin.older_names import (
    ATTENTION,
    KV_CACHE,
    MOE_BACKENDS,
    Read,
    conflicts,
    read_words,
    renamed_variables,
)

PLUGIN = "halfbyte"  # its entry point, and the key of our part of --additional-config
MODULE = "vllm.entrypoints.cli.main"

OURS = ("auto", "reference", "cpu", "gemv", "cuda", "triton")  # kernels that the plugin answers
THEIRS = ("marlin", "cutlass", "vllm")
EAGLE_HEADS = {
    "eagle3-short": "nvidia/{base}-Eagle3-short-context",
    "eagle3-long": "nvidia/{base}-Eagle3-long-context",
    "eagle3-throughput": "nvidia/{base}-Eagle3-throughput",
}


@dataclass(frozen=True)
class Serving:
    """What `halfbyte serve` says besides gates, in our words; None leaves it to vLLM."""

    host: str | None = None
    port: int | None = None
    name: str | None = None
    max_context: int | None = None
    max_seqs: int | None = None
    max_tokens_per_step: int | None = None
    memory_share: float | None = None  # of the GPU's memory
    tensor_parallel: int | None = None
    load_format: str | None = None
    draft: str | None = None  # head or model of --speculate
    draft_tokens: int = 3
    record: Path | None = None  # file that the plugin writes what ran into


@dataclass(frozen=True)
class Launch:
    command: tuple[str, ...]
    environment: Mapping[str, str]  # set besides what the process inherits
    refusals: tuple[str, ...] = ()  # why it must not be run
    notes: tuple[str, ...] = ()

    def check(self) -> Launch:
        if self.refusals:
            raise PlanError("vLLM cannot run what was asked:\n" + "\n".join(f"  {r}" for r in self.refusals))
        return self

    def child_environment(self) -> dict[str, str]:
        """All of it, for the process: without keys, and without our gates, which travel in the command."""
        gates = {"HALFBYTE_PRESET", *(name for axis in AXES for name in axis.variables)}
        return {k: v for k, v in child_environment().items() if k not in gates} | dict(self.environment)

    def shell(self) -> str:
        """One line for a terminal."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), shlex.join(self.command)])


@dataclass
class _Flags:
    words: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quantization: dict[str, Any] = field(default_factory=dict)


def vllm_command(
    model: str,
    gates: Gates,
    *,
    serving: Serving | None = None,
    words: Sequence[str] = (),
    plugin: bool = True,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Launch:
    """The command that serves `model` with vLLM. `words`: flags for vLLM as somebody typed them, older ones included.

    `environment` is what the process will inherit, to be looked at for names that nothing reads any more. Without
    `plugin` it is vLLM alone, and gates that only the plugin answers are refused.
    """
    serving, env = serving or Serving(), environment or {}
    read = read_words(words)
    flags = _Flags(refusals=list(read.refusals), notes=list(read.notes))
    flags.refusals += [
        f"{n} is set, but nothing reads it any more; unset it and use {RETIRED[n]}." for n in RETIRED if n in env
    ]
    gates = _merged(gates, read, flags)
    for part in (_moe, _linear, _formats, _attention, _values):
        part(gates, flags)
    _speculation(gates, serving, read, model, flags)
    if not plugin:
        changes = [c for c in gates.changes() if c in ("linear_kernel", "layers", "tile")]
        changes += ["attention"] if gates.attention == "cuda" else []
        if changes or any(kernel in OURS and kernel != "auto" for kernel in gates.moe_kernel):
            flags.refusals.append(f"{', '.join(changes) or 'moe_kernel'}: only the plugin can run it; leave it in.")
    command = [python, "-m", MODULE, "serve", read.model or model, *_serving(serving, read), *flags.words]
    if flags.quantization:
        command += ["--quantization-config", json.dumps(flags.quantization)]
    command += read.words
    variables = renamed_variables(env) | {"VLLM_PLUGINS": _plugins(env.get("VLLM_PLUGINS"), plugin)}
    if plugin:
        ours: dict[str, Any] = {"gates": gates.changes(Gates())}
        if serving.record is not None:
            ours["record"] = str(serving.record)
        command += ["--additional-config", json.dumps({PLUGIN: ours})]
    return Launch(tuple(command), variables, tuple(dict.fromkeys(flags.refusals)), tuple(dict.fromkeys(flags.notes)))


def _merged(gates: Gates, read: Read, flags: _Flags) -> Gates:
    """What the words say about gates holds where no gate was set."""
    try:
        flags.refusals += conflicts(gates, read.gates, Gates())
        return replace(gates, **{name: getattr(parse({name: text}, env={}), name) for name, text in read.gates.items()})
    except GateError as e:
        flags.refusals.append(str(e))
        return gates


def _plugins(allowed: str | None, plugin: bool) -> str:
    """VLLM_PLUGINS: our name in it or not; the route that tells which kernels ran needs it there."""
    others = [name for name in (allowed or "").split(",") if name and name != PLUGIN]
    return ",".join([*others, PLUGIN] if plugin else others)


# Flags of vLLM's own server, which is not there behind ours; True: it takes a value.
READS_TOOLS = {"--enable-auto-tool-choice": False, "--tool-call-parser": True, "--tool-parser-plugin": True}
LISTENS = (
    "--host",
    "--port",
    "--uds",
    "--api-key",
    "--root-path",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--served-model-name",
)


def behind_our_server(launch: Launch) -> Launch:
    """The same without what vLLM's own server would be told: ours reads harmony, tools included, and listens."""
    words, notes, refusals = list(launch.command), list(launch.notes), list(launch.refusals)
    for flag, takes in READS_TOOLS.items():
        if flag in words:
            at = words.index(flag)
            del words[at : at + 1 + takes]
            notes.append(f"{flag} is left out: our own server reads tool calls.")
    refusals += [
        f"{flag} would be for vLLM's own server, and here ours listens; give it to halfbyte serve, not to vLLM."
        for flag in LISTENS
        if flag in words
    ]
    return replace(launch, command=tuple(words), notes=tuple(notes), refusals=tuple(refusals))


# ---- gates -----------------------------------------------------------------------------------------------------------


def _one_kernel(kernels: Sequence[str], flag: str, flags: _Flags) -> str | None:
    """The kernel of all regimes, where it is vLLM's: vLLM holds one for all of them."""
    theirs = [k for k in dict.fromkeys(kernels) if k in THEIRS]
    if theirs and len(set(kernels)) > 1:
        flags.refusals.append(
            f"{flag}: {theirs[0]} is vLLM's, which holds the weights in one layout for all regimes; give it alone."
        )
        return None
    return kernels[0] if theirs else "ours"


def _moe(gates: Gates, flags: _Flags) -> None:
    kernel = _one_kernel(gates.moe_kernel, "--moe-kernel", flags)
    if kernel in MOE_BACKENDS:
        flags.words += ["--moe-backend", MOE_BACKENDS[kernel]]
    if kernel == "ours" or kernel is None:
        return
    formats = {gates.activation_in(regime) for regime in ACTIVATION_REGIMES}
    known = {"marlin": ("auto", "bf16"), "cutlass": ("auto", "bf16", "mxfp8"), "vllm": ("auto", "bf16", "mxfp8")}[
        kernel
    ]
    name = {"marlin": "Marlin", "cutlass": "FlashInfer's CUTLASS kernel", "vllm": "vLLM"}[kernel]
    if len(formats) > 1:
        flags.refusals.append(f"--activation {gates.activation}: {name} has one format for all regimes.")
    elif (asked := formats.pop()) not in known:
        flags.refusals.append(f"--activation {asked}: {name} takes {' and '.join(known[1:])} activations.")
    elif asked == "mxfp8":
        flags.quantization["moe"] = {"activation": "mxfp8"}
    if gates.tile != "auto":
        flags.refusals.append(
            f"--tile {gates.tile}: {name} chooses its tiles itself today (FLASHINFER_MOE_TILE is read by nothing); "
            "--moe-kernel triton follows it."
        )


def _linear(gates: Gates, flags: _Flags) -> None:
    kernel = _one_kernel(gates.linear_kernel, "--linear-kernel", flags)
    if kernel == "cutlass":
        flags.refusals.append("--linear-kernel cutlass: FlashInfer has no such product of dense layers for gpt-oss.")
    if kernel == "marlin" and "mxfp4" not in (gates.layers.qkv, gates.layers.o, gates.layers.lm_head):
        flags.refusals.append("--linear-kernel marlin multiplies MXFP4 layers; add --mxfp4-layers qkv,o,lm_head.")
    if kernel == "vllm" and set(gates.layers[1:]) != {"checkpoint"}:
        flags.refusals.append(
            f"--layers {gates.layers}: vLLM's own dense layers stay as the checkpoint has them; "
            "leave --linear-kernel at auto."
        )


def _formats(gates: Gates, flags: _Flags) -> None:
    if gates.layers.moe == "q8":
        flags.refusals.append("--layers moe=q8: inside vLLM experts are MXFP4, as the checkpoint has them.")


def _attention(gates: Gates, flags: _Flags) -> None:
    if gates.attention in ATTENTION:
        flags.words += ["--attention-config", json.dumps({"backend": ATTENTION[gates.attention]})]
    elif gates.attention not in ("auto", "cuda"):
        flags.refusals.append(
            f"--attention {gates.attention}: it is not made for vLLM's pages; use auto, cuda, {', '.join(ATTENTION)}."
        )
    if gates.sinks == "off":
        flags.refusals.append("--sinks off: vLLM has no such switch, and gpt-oss writes garbage without sinks.")


def _values(gates: Gates, flags: _Flags) -> None:
    if gates.kv_dtype in KV_CACHE:
        flags.words += ["--kv-cache-dtype", KV_CACHE[gates.kv_dtype]]
    elif gates.kv_dtype != "auto":
        flags.refusals.append(f"--kv-dtype {gates.kv_dtype}: vLLM keeps keys and values in bf16 or fp8.")
    if gates.graphs == "off":
        flags.words.append("--enforce-eager")


def _speculation(gates: Gates, serving: Serving, read: Read, model: str, flags: _Flags) -> None:
    method = gates.speculate
    if method == "off":
        return
    if any(word.startswith("--speculative-config") for word in read.words):
        flags.refusals.append("--speculate and --speculative-config say the same thing; give only one of them.")
        return
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": serving.draft_tokens}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
    elif method in EAGLE_HEADS:
        base = next((b for b in ("gpt-oss-120b", "gpt-oss-20b") if b in model), None)
        if serving.draft is None and base is None:
            flags.refusals.append(
                f"--speculate {method}: such heads are published for gpt-oss-120b and -20b; use --draft."
            )
        config |= {"method": "eagle3", "model": serving.draft or EAGLE_HEADS[method].format(base=base)}
    elif method in ("eagle3", "draft"):
        if serving.draft is None:
            flags.refusals.append(f"--speculate {method}: name its head or model with --draft.")
        config |= {"method": "eagle3" if method == "eagle3" else "draft_model", "model": serving.draft}
    flags.words += ["--speculative-config", json.dumps(config)]


# ---- what is no gate -------------------------------------------------------------------------------------------------


def _serving(serving: Serving, read: Read) -> list[str]:
    """Our words for serving as vLLM's; what somebody typed for vLLM itself wins."""
    pairs = {
        "--host": serving.host, "--port": serving.port, "--served-model-name": serving.name,
        "--max-model-len": serving.max_context, "--max-num-seqs": serving.max_seqs,
        "--max-num-batched-tokens": serving.max_tokens_per_step, "--gpu-memory-utilization": serving.memory_share,
        "--tensor-parallel-size": serving.tensor_parallel, "--load-format": serving.load_format,
    }  # fmt: skip
    given = {name: value for name, value in pairs.items() if value is not None and read.value_of(name) is None}
    return [word for name, value in given.items() for word in (name, str(value))]
