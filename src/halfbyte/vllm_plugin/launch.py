"""Builds vLLM's command line: the only mapping from gates, and from older stacks' names, to vLLM's flags.

A value that vLLM cannot take is a refusal with its reason, and a `VllmLaunch` with a refusal is not run. Gates for our
plugin travel in `--additional-config`, which vLLM passes to every process and includes in the key of its compile cache.
This module does not import vLLM, starts no process and inspects no GPU.
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
from halfbyte.gates import ACTIVATION_REGIMES, AXES, RETIRED, Gates, Layers, as_stored, child_environment, parse
from halfbyte.vllm_plugin.older_names import (
    ATTENTION,
    KV_CACHE,
    MOE_BACKENDS,
    ParsedArguments,
    conflicts,
    read_arguments,
    renamed_variables,
)

PLUGIN = "halfbyte"  # its entry point, and the key of our part of --additional-config
MODULE = "vllm.entrypoints.cli.main"

PLUGIN_KERNELS = ("auto", "reference", "cpu", "gemv", "cuda", "triton")  # kernels that the plugin answers
VLLM_KERNELS = ("marlin", "cutlass", "vllm")
EAGLE_HEADS = {
    "eagle3-short": "nvidia/{base}-Eagle3-short-context",
    "eagle3-long": "nvidia/{base}-Eagle3-long-context",
    "eagle3-throughput": "nvidia/{base}-Eagle3-throughput",
}


@dataclass(frozen=True)
class Serving:
    """The options of `halfbyte serve` other than gates, by our names; None leaves a value to vLLM."""

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
    record: Path | None = None  # file into which the plugin writes its record


@dataclass(frozen=True)
class VllmLaunch:
    command: tuple[str, ...]
    environment: Mapping[str, str]  # set besides what the process inherits
    refusals: tuple[str, ...] = ()  # why it must not be run
    notes: tuple[str, ...] = ()

    def check(self) -> VllmLaunch:
        if self.refusals:
            raise PlanError("vLLM cannot run with these options:\n" + "\n".join(f"  {r}" for r in self.refusals))
        return self

    def child_environment(self) -> dict[str, str]:
        """The environment of the process: without keys and without our gates, which travel in the command."""
        gates = {"HALFBYTE_PRESET", *(name for axis in AXES for name in axis.variables)}
        return {k: v for k, v in child_environment().items() if k not in gates} | dict(self.environment)

    def shell(self) -> str:
        """The launch as one shell line."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), shlex.join(self.command)])


@dataclass
class _Flags:
    arguments: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quantization: dict[str, Any] = field(default_factory=dict)


def vllm_command(
    model: str,
    gates: Gates,
    *,
    serving: Serving | None = None,
    arguments: Sequence[str] = (),
    plugin: bool = True,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> VllmLaunch:
    """The command that serves `model` with vLLM. `arguments`: the user's flags for vLLM, older names included.

    `environment`, which the process will inherit, is checked for retired names. Without `plugin` vLLM runs alone, and
    gates that need the plugin are refused.
    """
    serving, env = serving or Serving(), environment or {}
    parsed = read_arguments(arguments)
    flags = _Flags(refusals=list(parsed.refusals), notes=list(parsed.notes))
    flags.refusals += [
        f"{n} is set, but nothing reads it any more; unset it and use {RETIRED[n]}." for n in RETIRED if n in env
    ]
    gates = _merged(gates, parsed, flags)
    for part in (_moe, _linear, _formats, _attention, _values):
        part(gates, flags)
    _speculation(gates, serving, parsed, model, flags)
    if not plugin:
        differing = as_stored(gates).changes(Gates(layers=Layers()))
        changes = [c for c in differing if c in ("linear_kernel", "layers", "tile")]
        changes += ["attention"] if gates.attention == "cuda" else []
        if changes or any(kernel in PLUGIN_KERNELS and kernel != "auto" for kernel in gates.moe_kernel):
            flags.refusals.append(f"{', '.join(changes) or 'moe_kernel'} needs the plugin; enable it.")
    command = [python, "-m", MODULE, "serve", parsed.model or model, *_serving(serving, parsed), *flags.arguments]
    if flags.quantization:
        command += ["--quantization-config", json.dumps(flags.quantization)]
    command += parsed.arguments
    variables = renamed_variables(env) | {"VLLM_PLUGINS": _plugins(env.get("VLLM_PLUGINS"), plugin)}
    if plugin:
        section: dict[str, Any] = {"gates": gates.changes()}
        if serving.record is not None:
            section["record"] = str(serving.record)
        command += ["--additional-config", json.dumps({PLUGIN: section})]
    return VllmLaunch(
        tuple(command), variables, tuple(dict.fromkeys(flags.refusals)), tuple(dict.fromkeys(flags.notes))
    )


def _merged(gates: Gates, parsed: ParsedArguments, flags: _Flags) -> Gates:
    """Gates with the values from vLLM's own flags where the user set no gate."""
    try:
        flags.refusals += conflicts(gates, parsed.gates, Gates())
        return replace(
            gates, **{name: getattr(parse({name: text}, env={}), name) for name, text in parsed.gates.items()}
        )
    except GateError as e:
        flags.refusals.append(str(e))
        return gates


def _plugins(allowed: str | None, plugin: bool) -> str:
    """VLLM_PLUGINS with or without our name, which the /halfbyte/kernels route also needs."""
    others = [name for name in (allowed or "").split(",") if name and name != PLUGIN]
    return ",".join([*others, PLUGIN] if plugin else others)


# Flags of vLLM's own server, which does not run behind ours; True: the flag takes a value.
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


def behind_our_server(launch: VllmLaunch) -> VllmLaunch:
    """A launch without the flags of vLLM's server: our server listens and parses harmony, including tool calls."""
    arguments, notes, refusals = list(launch.command), list(launch.notes), list(launch.refusals)
    for flag, takes in READS_TOOLS.items():
        if flag in arguments:
            at = arguments.index(flag)
            del arguments[at : at + 1 + takes]
            notes.append(f"{flag} is ignored: halfbyte's server parses tool calls.")
    refusals += [
        f"{flag} is a flag of vLLM's own server, which does not run here; pass it to halfbyte serve instead."
        for flag in LISTENS
        if flag in arguments
    ]
    return replace(launch, command=tuple(arguments), notes=tuple(notes), refusals=tuple(refusals))


# ---- gates -----------------------------------------------------------------------------------------------------------


def _one_kernel(kernels: Sequence[str], flag: str, flags: _Flags) -> str | None:
    """The one vLLM kernel for all regimes, "ours" for our kernels, None for a refused mix of both."""
    vllm_kernels = [k for k in dict.fromkeys(kernels) if k in VLLM_KERNELS]
    if vllm_kernels and len(set(kernels)) > 1:
        flags.refusals.append(
            f"{flag}: {vllm_kernels[0]} is a kernel of vLLM, which holds the weights in one layout for all regimes; "
            "use it for all regimes or for none."
        )
        return None
    return kernels[0] if vllm_kernels else "ours"


def _moe(gates: Gates, flags: _Flags) -> None:
    kernel = _one_kernel(gates.moe_kernel, "--moe-kernel", flags)
    if kernel in MOE_BACKENDS:
        flags.arguments += ["--moe-backend", MOE_BACKENDS[kernel]]
    if kernel == "ours" or kernel is None:
        return
    formats = {gates.activation_in(regime).replace("float", "bf16") for regime in ACTIVATION_REGIMES}
    supported = {"marlin": ("auto", "bf16"), "cutlass": ("auto", "bf16", "mxfp8"), "vllm": ("auto", "bf16", "mxfp8")}[
        kernel
    ]
    name = {"marlin": "Marlin", "cutlass": "FlashInfer's CUTLASS kernel", "vllm": "vLLM"}[kernel]
    if len(formats) > 1:
        flags.refusals.append(f"--activation {gates.activation}: {name} has one format for all regimes.")
    elif (activation := formats.pop()) not in supported:
        flags.refusals.append(f"--activation {activation}: {name} takes {' and '.join(supported[1:])} activations.")
    elif activation == "mxfp8":
        flags.quantization["moe"] = {"activation": "mxfp8"}
    if gates.tile != "auto":
        flags.refusals.append(
            f"--tile {gates.tile}: {name} chooses its own tiles (nothing reads FLASHINFER_MOE_TILE any more); use "
            "--moe-kernel triton, which follows --tile."
        )


def _linear(gates: Gates, flags: _Flags) -> None:
    kernel = _one_kernel(gates.linear_kernel, "--linear-kernel", flags)
    layers = as_stored(gates).layers
    dense = {layers.qkv, layers.o, layers.lm_head}
    if kernel == "cutlass":
        flags.refusals.append("--linear-kernel cutlass: FlashInfer has no such product of dense layers for gpt-oss.")
    if kernel == "marlin" and "mxfp4" not in dense:
        flags.refusals.append("--linear-kernel marlin multiplies MXFP4 layers; add --mxfp4-layers qkv,o,lm_head.")
    if kernel == "vllm" and dense != {"checkpoint"}:
        flags.refusals.append(
            f"--layers {gates.layers}: vLLM's own dense layers stay in the checkpoint's format; "
            "leave --linear-kernel at auto."
        )


def _formats(gates: Gates, flags: _Flags) -> None:
    if gates.layers.exceptions:
        same = gates.layers._replace(exceptions=())
        flags.refusals.append(
            f"--layers {gates.layers}: inside vLLM all layers of a group have one format; use --layers {same}."
        )
    if gates.layers.moe == "q8":
        flags.refusals.append("--layers moe=q8: inside vLLM the experts stay in MXFP4, the checkpoint's format.")


def _attention(gates: Gates, flags: _Flags) -> None:
    if gates.attention in ATTENTION:
        flags.arguments += ["--attention-config", json.dumps({"backend": ATTENTION[gates.attention]})]
    elif gates.attention not in ("auto", "cuda"):
        flags.refusals.append(
            f"--attention {gates.attention} does not support vLLM's pages; use auto, cuda, {', '.join(ATTENTION)}."
        )
    if gates.sinks == "off":
        flags.refusals.append("--sinks off: vLLM has no such switch, and gpt-oss writes garbage without sinks.")


def _values(gates: Gates, flags: _Flags) -> None:
    if gates.kv_dtype in KV_CACHE:
        flags.arguments += ["--kv-cache-dtype", KV_CACHE[gates.kv_dtype]]
    elif gates.kv_dtype != "auto":
        flags.refusals.append(f"--kv-dtype {gates.kv_dtype}: vLLM keeps keys and values in bf16 or fp8.")
    if gates.graphs == "off":
        flags.arguments.append("--enforce-eager")
    if gates.experts_in_host not in ("auto", "0"):
        flags.refusals.append("--experts-in-host: vLLM keeps experts on the GPU; serve without --engine vllm.")
    if gates.deterministic == "on":
        flags.refusals.append("--deterministic: vLLM schedules its steps itself; serve without --engine vllm.")


def _speculation(gates: Gates, serving: Serving, parsed: ParsedArguments, model: str, flags: _Flags) -> None:
    method = gates.speculate
    if method == "off":
        return
    if any(word.startswith("--speculative-config") for word in parsed.arguments):
        flags.refusals.append("--speculate and --speculative-config set the same option; use only one of them.")
        return
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": serving.draft_tokens}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
    elif method in EAGLE_HEADS:
        base = next((b for b in ("gpt-oss-120b", "gpt-oss-20b") if b in model), None)
        if serving.draft is None and base is None:
            flags.refusals.append(
                f"--speculate {method}: heads are published only for gpt-oss-120b and -20b; name yours with --draft."
            )
        config |= {"method": "eagle3", "model": serving.draft or EAGLE_HEADS[method].format(base=base)}
    elif method in ("eagle3", "draft"):
        if serving.draft is None:
            flags.refusals.append(f"--speculate {method}: name its head or model with --draft.")
        config |= {"method": "eagle3" if method == "eagle3" else "draft_model", "model": serving.draft}
    flags.arguments += ["--speculative-config", json.dumps(config)]


# ---- options that are not gates --------------------------------------------------------------------------------------


def _serving(serving: Serving, parsed: ParsedArguments) -> list[str]:
    """Our serving options as vLLM's flags; the user's own flags for vLLM take precedence."""
    pairs = {
        "--host": serving.host,
        "--port": serving.port,
        "--served-model-name": serving.name,
        "--max-model-len": serving.max_context,
        "--max-num-seqs": serving.max_seqs,
        "--max-num-batched-tokens": serving.max_tokens_per_step,
        "--gpu-memory-utilization": serving.memory_share,
        "--tensor-parallel-size": serving.tensor_parallel,
        "--load-format": serving.load_format,
    }
    values = {name: value for name, value in pairs.items() if value is not None and parsed.value_of(name) is None}
    return [word for name, value in values.items() for word in (name, str(value))]
