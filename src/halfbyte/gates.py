"""The gates: orthogonal axes that say which kernels and formats may run, parsed and checked once.

An axis never forces another. `auto` lets the plan choose; any other value runs exactly that or fails with every
reason. Flags win over environment variables, both win over a preset. This is the only file that reads the
environment, and it reads all of it: a variable of ours that it does not know, or one that older MXFP4 stacks used and
nothing reads any more, is an error that names today's flag.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from halfbyte.errors import GateError

LAYER_GROUPS = ("moe", "qkv", "o", "lm_head")
LAYER_FORMATS = ("checkpoint", "q8", "mxfp4")
REGIME_NAMES = ("decode", "batch", "prefill")
ACTIVATION_REGIMES = (*REGIME_NAMES, "long")  # long prompts take the kernels of prefill


class PerRegime(NamedTuple):
    decode: str = "auto"
    batch: str = "auto"
    prefill: str = "auto"

    def __str__(self) -> str:
        if len(set(self)) == 1:
            return self.decode
        return ",".join(f"{r}={v}" for r, v in zip(REGIME_NAMES, self) if v != "auto")


class Layers(NamedTuple):
    moe: str = "checkpoint"
    qkv: str = "checkpoint"
    o: str = "checkpoint"
    lm_head: str = "checkpoint"

    def __str__(self) -> str:
        changed = [f"{g}={f}" for g, f in zip(LAYER_GROUPS, self) if f != "checkpoint"]
        return ",".join(changed) or "checkpoint"


@dataclass(frozen=True)
class Axis:
    """One axis as a user meets it."""

    field: str
    flag: str
    values: tuple[str, ...]
    variables: tuple[str, ...]  # environment names, ours first
    meaning: str
    aliases: Mapping[str, str]
    per_regime: bool = False


# gemv: the decode step in one CUDA kernel; cuda: any kernel of ours in CUDA C++, that one included; vllm: inside vLLM,
# the one that it would take without us.
_KERNELS = ("auto", "reference", "cpu", "gemv", "cuda", "triton", "cutlass", "marlin", "vllm")
_EAGLE = ("eagle3", "eagle3-short", "eagle3-long", "eagle3-throughput")

AXES: tuple[Axis, ...] = (
    Axis("moe_kernel", "--moe-kernel", _KERNELS, ("HALFBYTE_MOE_KERNEL", "VLLM_MXFP4_MOE_KERNEL"),
         "the kernel of the expert MLP, or one for each regime, for example decode=gemv,prefill=triton",
         {"gemm": "cutlass"}, True),
    Axis("linear_kernel", "--linear-kernel", _KERNELS, ("HALFBYTE_LINEAR_KERNEL",),
         "the kernel of qkv, o and lm_head, or one for each regime", {"gemm": "cutlass"}, True),
    Axis("activation", "--activation", ("auto", "f32", "bf16", "int8", "fp8", "mxfp8", "mxfp4"),
         ("HALFBYTE_ACTIVATION", "VLLM_MXFP4_ACTIVATION"),
         "the format of activations in front of quantised matrices, or one for each regime, for example long=fp8", {}),
    Axis("layers", "--layers", LAYER_FORMATS, ("HALFBYTE_LAYERS", "VLLM_MXFP4_LAYERS"),
         "the format of every layer, or of each group of layers, for example qkv=q8,o=q8,lm_head=mxfp4", {}),
    Axis("tile", "--tile", ("auto", "128x128", "64x128"), ("HALFBYTE_TILE", "FLASHINFER_MOE_TILE"),
         "the tile of the grouped matrix product", {}),
    Axis("attention", "--attention", ("auto", "reference", "cpu", "cuda", "triton", "flashinfer", "flash_attn"),
         ("HALFBYTE_ATTENTION", "VLLM_ATTENTION_BACKEND"), "the attention kernel", {"triton_attn": "triton"}),
    Axis("sinks", "--sinks", ("auto", "on", "off"), ("HALFBYTE_SINKS", "VLLM_ATTENTION_SINKS"),
         "attention sinks; off is for tests, and makes every answer wrong",
         {"1": "on", "0": "off", "true": "on", "false": "off"}),
    Axis("kv_dtype", "--kv-dtype", ("auto", "f32", "bf16", "fp8"), ("HALFBYTE_KV_DTYPE",),
         "the format of the KV cache", {}),
    Axis("speculate", "--speculate", ("off", "ngram", "suffix", *_EAGLE, "draft"), ("HALFBYTE_SPECULATE",),
         "speculative decoding: how tokens are guessed ahead", {}),
    Axis("graphs", "--enforce-eager", ("on", "off"), ("HALFBYTE_CUDA_GRAPHS",),
         "CUDA graphs; --enforce-eager switches them off", {"1": "on", "0": "off"}),
    Axis("cpu_instructions", "--cpu-instructions",
         ("auto", "avx512-amx", "avx512", "avx-vnni", "avx2", "neon-i8mm", "neon", "portable"),
         ("HALFBYTE_CPU_INSTRUCTIONS",), "the instruction set of the CPU kernels", {}),
    Axis("threads", "--threads", ("auto",), ("HALFBYTE_THREADS",),
         "threads of the CPU kernels: a number, or auto for the physical cores that this process may use", {}),
)  # fmt: skip
_BY_FIELD = {a.field: a for a in AXES}

# Values that were asked for and will not come, with the reason.
REFUSED: dict[tuple[str, str], str] = {
    ("activation", "fp6"): "the tensor cores hold FP6 in bytes of eight bits and multiply it no faster than FP8, so it "
    "has mxfp8's cost and fewer bits; use mxfp8",
}

# Variables of ours that are not gates. Value: what they are for (docs/env.md is made from this).
SETTINGS: dict[str, str] = {
    "HALFBYTE_PRESET": "preset to start from (as --preset)",
    "HALFBYTE_API_KEY": "API key the server asks for",
    "HALFBYTE_CACHE_DIR": "where compiled kernels, the list of running servers and the history of `chat` are kept "
    "(default: ~/.cache/halfbyte)",
    "HALFBYTE_CXX": "the C++ compiler of the CPU kernels (default: the first of c++, g++, clang++ in PATH)",
    "OMP_NUM_THREADS": "the most threads of the CPU kernels where --threads is auto, as of torch's own operations",
    "HALFBYTE_MODELS_DIR": "where `halfbyte pull` puts models (default: ~/.cache/halfbyte/models)",
}

# Older stacks used these; nothing reads them any more.
RETIRED: dict[str, str] = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "--moe-kernel cutlass --activation bf16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "--moe-kernel cutlass --activation mxfp8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": "--moe-kernel cutlass --activation mxfp8",
    "VLLM_USE_FLASHINFER_MOE_FP4": "--moe-kernel cutlass (NVFP4 is another format and never applies to gpt-oss)",
    "VLLM_FLASHINFER_MOE_BACKEND": "--moe-kernel",
    "VLLM_USE_ATTENTION_SINKS": "--sinks",
    "VLLM_USE_CUDA_GRAPH": "--enforce-eager",
    "VLLM_MXFP4_BACKEND": "--moe-kernel",
    "VLLM_MXFP4_USE_MARLIN": "--moe-kernel marlin",
}
_OURS = ("HALFBYTE_", "VLLM_MXFP4_")


@dataclass(frozen=True)
class Gates:
    moe_kernel: PerRegime = PerRegime()
    linear_kernel: PerRegime = PerRegime()
    activation: str = "auto"
    layers: Layers = Layers()
    tile: str = "auto"
    attention: str = "auto"
    sinks: str = "auto"
    kv_dtype: str = "auto"
    speculate: str = "off"
    graphs: str = "on"
    cpu_instructions: str = "auto"
    threads: str = "auto"

    def __post_init__(self) -> None:
        """What code says is held to the same values as what a person types."""
        for axis in AXES:
            object.__setattr__(self, axis.field, _checked(axis, getattr(self, axis.field)))

    def backend(self, axis: str, regime: str) -> str:
        """The gate value of a plan axis (moe, linear, attention) in a regime."""
        if axis == "attention":
            return self.attention
        per = self.moe_kernel if axis == "moe" else self.linear_kernel
        return cast(str, getattr(per, "prefill" if regime == "long" else regime))

    def activation_in(self, regime: str) -> str:
        """`activation` is one value, or values for some regimes (long=fp8) and auto for the others.

        What is said of prefill holds for long prompts, too, unless they are named."""
        if "=" not in self.activation:
            return self.activation
        formats = dict(part.split("=", 1) for part in self.activation.split(","))
        return formats.get(regime, formats.get("prefill", "auto") if regime == "long" else "auto")

    @property
    def layer_formats(self) -> dict[str, str]:
        return dict(zip(LAYER_GROUPS, self.layers))

    def as_dict(self) -> dict[str, str]:
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}

    def changes(self, base: Gates | None = None) -> dict[str, str]:
        """What differs from `base` (default: `exact`), axis -> value."""
        mine, other = self.as_dict(), (base or PRESETS["exact"].gates).as_dict()
        return {k: v for k, v in mine.items() if v != other[k]}


def parse(
    flags: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] | None = None,
    preset: str | None = None,
) -> Gates:
    """Gates from flags (by field name; None means not given), environment and preset, in that order of precedence.

    The field `mxfp4_layers` is the short form of `layers`: a list of groups to hold in MXFP4.
    """
    env = os.environ if env is None else env
    check_environment(env)
    gates = _preset(preset or env.get("HALFBYTE_PRESET") or "exact").gates
    for axis in AXES:
        variables = [(name, env[name]) for name in axis.variables if env.get(name)]
        values = {_value(axis, text, name) for name, text in variables}
        if len(values) > 1:
            raise GateError(f"{' and '.join(n for n, _ in variables)} disagree; set only one of them.")
        if values:
            gates = replace(gates, **{axis.field: values.pop()})
    values_by_flag = {k: v for k, v in (flags or {}).items() if v is not None}
    short = values_by_flag.pop("mxfp4_layers", None)
    if short is not None and "layers" in values_by_flag:
        raise GateError("--layers and --mxfp4-layers say the same thing; give only one of them.")
    if short is not None:
        gates = replace(gates, layers=_short_layers(short, "--mxfp4-layers"))
    for name, text in values_by_flag.items():
        if name not in _BY_FIELD:
            raise GateError(f"there is no gate {name!r}; the gates are {_list(a.flag for a in AXES)}.")
        gates = replace(gates, **{name: _value(_BY_FIELD[name], text, _BY_FIELD[name].flag)})
    return gates


def check_environment(env: Mapping[str, str]) -> None:
    known = {v for a in AXES for v in a.variables} | set(SETTINGS)
    for name in sorted(env):
        if name in RETIRED:
            raise GateError(f"{name} is set, but nothing reads it any more; unset it and use {RETIRED[name]}.")
        if name.startswith(_OURS) and name not in known:
            raise GateError(f"the environment variable {name} is unknown{_near(name, known)}; unset it.")


def setting(name: str, env: Mapping[str, str] | None = None) -> str | None:
    """A variable of SETTINGS, or None."""
    assert name in SETTINGS, name
    return (os.environ if env is None else env).get(name) or None


def cache_folder(kind: str) -> Path:
    """Where what is compiled is kept, by kind: cubin, emulator, cpu."""
    base = setting("HALFBYTE_CACHE_DIR")
    return (Path(base).expanduser() if base else Path.home() / ".cache" / "halfbyte") / kind


def models_folder() -> Path:
    """Where `halfbyte pull` puts models and looks for them."""
    base = setting("HALFBYTE_MODELS_DIR")
    return Path(base).expanduser() if base else Path.home() / ".cache" / "halfbyte" / "models"


_SECRET = re.compile(r"(_KEY|_TOKEN|_SECRET|_PASSWORD|_CREDENTIALS)$")


def child_environment(**extra: str) -> dict[str, str]:
    """What a process of ours starts with: this one's environment, without keys, which none of them needs."""
    return {**{name: value for name, value in os.environ.items() if not _SECRET.search(name)}, **extra}


def export(variables: Mapping[str, str]) -> None:
    """Variables for a library that this process is about to import, which reads them itself."""
    os.environ.update(variables)


def inherited() -> Mapping[str, str]:
    """What this process was started with, for whoever starts another program with it."""
    return dict(os.environ)


def _preset(name: str) -> Preset:
    try:
        return PRESETS[name.strip().lower()]
    except KeyError:
        raise GateError(f"there is no preset {name!r}; use one of {_list(PRESETS)}.") from None


def _value(axis: Axis, text: str, where: str) -> Any:
    text = text.strip().lower()
    if axis.field == "layers":
        return _layers(text, where)
    if axis.field == "activation" and "=" in text:
        parts = {r: _single_value(axis, v, where) for r, v in _pairs(text, where, ACTIVATION_REGIMES, "regime")}
        usual = {"long": parts.get("prefill", "auto")}  # what needs no saying
        pairs = [f"{r}={parts[r]}" for r in ACTIVATION_REGIMES if r in parts and parts[r] != usual.get(r, "auto")]
        return ",".join(pairs) or "auto"
    if axis.per_regime and "=" in text:
        parts = dict(_pairs(text, where, REGIME_NAMES, "regime"))
        return PerRegime(*(_single_value(axis, parts.get(r, "auto"), where) for r in REGIME_NAMES))
    if axis.field == "threads" and text.isdigit() and int(text) > 0:
        return str(int(text))
    value = _single_value(axis, text, where)
    return PerRegime(value, value, value) if axis.per_regime else value


def _checked(axis: Axis, value: Any) -> Any:
    """A value as a field of Gates holds it, given so or as text."""
    where = f"Gates({axis.field}=...)"
    if isinstance(value, str):
        return _value(axis, value, where)
    kind: Any = Layers if axis.field == "layers" else PerRegime if axis.per_regime else None
    if kind is None or not isinstance(value, tuple | list) or len(value) != len(kind._fields):
        raise GateError(f"{where} is {value!r}; give text, such as {axis.values[0]!r}.")
    if not all(isinstance(part, str) for part in value):
        raise GateError(f"{where} is {value!r}; each of its parts is text.")
    return kind(*(_single_value(axis, part.strip().lower(), where) for part in value))


def _single_value(axis: Axis, text: str, where: str) -> str:
    text = axis.aliases.get(text, text)
    if (axis.field, text) in REFUSED:
        raise GateError(f"{where} is {text!r}: {REFUSED[axis.field, text]}.")
    if text not in axis.values:
        known = "auto or a number from 1 on" if axis.field == "threads" else f"one of {_list(axis.values)}"
        raise GateError(f"{where} is {text!r}{_near(text, axis.values)}; use {known}.")
    return text


def _layers(text: str, where: str) -> Layers:
    if "=" not in text and text not in LAYER_FORMATS:
        return _short_layers(text, where)
    if text in LAYER_FORMATS:
        return Layers(text, text, text, text)
    chosen = dict(_pairs(text, where, LAYER_GROUPS, "layer group"))
    for group, name in chosen.items():
        if name not in LAYER_FORMATS:
            raise GateError(f"{where}: {group}={name!r} is no layer format; use one of {_list(LAYER_FORMATS)}.")
    return Layers(**chosen)


def _short_layers(text: str, where: str) -> Layers:
    groups = [g.strip() for g in text.lower().split(",") if g.strip()]
    if groups == ["all"]:
        return _ALL_MXFP4
    if not groups:
        raise GateError(f"{where} names nothing; use {_list(LAYER_GROUPS)}, or all.")
    for group in groups:
        if group not in LAYER_GROUPS:
            raise GateError(f"{where}: {group!r} is no layer group; use {_list(LAYER_GROUPS)}, or all.")
    return Layers(**dict.fromkeys(groups, "mxfp4"))


def _pairs(text: str, where: str, keys: tuple[str, ...], what: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, sign, value = (s.strip() for s in part.partition("="))
        if not sign or not value or key not in keys:
            raise GateError(f"{where}: {part!r} is not {what}=value; the {what}s are {_list(keys)}.")
        if key in dict(out):
            raise GateError(f"{where} names {key} twice.")
        out.append((key, value))
    return out


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _near(text: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@dataclass(frozen=True)
class Preset:
    gates: Gates
    meaning: str


_ALL_MXFP4 = Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4")
_CUTLASS = PerRegime("cutlass", "cutlass", "cutlass")
_MARLIN = PerRegime("marlin", "marlin", "marlin")
_GEMV = PerRegime("gemv", "auto", "auto")

# The lettered ones are the test points of the MXFP4-on-vLLM work this project grew from. Where those said "sinks off"
# they meant a kernel option; without sinks gpt-oss writes garbage, so here they leave the sinks to the model.
PRESETS: dict[str, Preset] = {
    "exact": Preset(Gates(), "checkpoint formats, bf16 activations: bit-faithful weights (the default)"),
    "balanced": Preset(Gates(layers=Layers("checkpoint", "q8", "q8", "q8")), "dense layers in 8 bits"),
    "fast": Preset(Gates(layers=_ALL_MXFP4), "every layer in MXFP4"),
    "baseline": Preset(Gates(moe_kernel=_MARLIN, activation="bf16"), "what upstream vLLM does: Marlin, bf16"),
    "a": Preset(Gates(moe_kernel=_CUTLASS, activation="mxfp8"), "CUTLASS, mxfp8"),
    "b": Preset(Gates(moe_kernel=_CUTLASS, activation="mxfp8", sinks="on"), "A with sinks asked for"),
    "c": Preset(
        Gates(moe_kernel=_CUTLASS, activation="mxfp8", sinks="on", speculate="eagle3-short", graphs="off"),
        "B with the short-context EAGLE-3 head, eager",
    ),
    "d": Preset(
        Gates(moe_kernel=_CUTLASS, activation="mxfp8", speculate="eagle3-long"), "A with the long-context EAGLE-3 head"
    ),
    "e": Preset(
        Gates(moe_kernel=_CUTLASS, activation="mxfp8", speculate="eagle3-throughput"),
        "A with the throughput EAGLE-3 head",
    ),
    "f": Preset(Gates(moe_kernel=_GEMV, activation="bf16"), "GEMV decode, bf16"),
}
