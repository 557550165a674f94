"""The gates: orthogonal axes that select kernels and formats, parsed and checked once.

An axis never forces another. `auto` lets the plan choose; any other value runs exactly that or fails with every
reason. Flags take precedence over environment variables, and both over a preset. Only this file reads the environment,
and it checks all of it: an unknown halfbyte variable, or one that only older MXFP4 stacks used, is an error that names
the present flag.
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
UNQUANTISED = ("bf16", "f16", "f32")
LAYER_KINDS = ("full", "sliding")  # of attention: they name layers of a group, as the number of a layer does
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
    """The format of each group of layers, and of the layers that differ from their group.

    `auto` depends on the device: experts are MXFP4 on a GPU and as stored on a CPU; `layers_on` says what it is for
    dense layers. A name in `exceptions` is a group with a kind of attention or the number of a layer: qkv.full, qkv.0.
    """

    moe: str = "auto"
    qkv: str = "checkpoint"
    o: str = "checkpoint"
    lm_head: str = "checkpoint"
    exceptions: tuple[tuple[str, str], ...] = ()  # (name, format)

    @property
    def groups(self) -> dict[str, str]:
        return {"moe": self.moe, "qkv": self.qkv, "o": self.o, "lm_head": self.lm_head}

    def __str__(self) -> str:
        if self == AUTO_LAYERS:
            return "auto"
        default = Layers().groups
        changed = [(group, form) for group, form in self.groups.items() if form != default[group]]
        return ",".join(f"{name}={f}" for name, f in (*changed, *self.exceptions)) or "checkpoint"


def format_of_layer(formats: Mapping[str, str], group: str, layer: int | None, kind: str | None) -> str:
    """The format that `formats` (`Gates.layer_formats`) names for one layer of a group: by the layer's number, else by
    its kind of attention, else by the group; checkpoint where it names none."""
    names = (f"{group}.{layer}", f"{group}.{kind}", group)
    return next((formats[name] for name in names if name in formats), "checkpoint")


def check_layer_names(formats: Iterable[str], layers: int) -> None:
    """Refuse a layer that the model does not have."""
    for name in formats:
        number = name.partition(".")[2]
        if number.isdigit() and int(number) >= layers:
            raise GateError(f"--layers names {name}, but the model has {layers} layers, 0 to {layers - 1}.")


AUTO_LAYERS = Layers("auto", "auto", "auto", "auto")  # without a flag or a preset


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
    switch: bool = False  # its flag takes no value
    spellings: tuple[str, ...] = ()  # other names of its flag


# gemv: the decode step in one CUDA kernel; cuda: any of our kernels in CUDA C++, including that one; vllm: inside vLLM,
# the kernel that it uses without the plugin.
_KERNELS = ("auto", "reference", "cpu", "gemv", "cuda", "triton", "cutlass", "marlin", "vllm")
_EAGLE = ("eagle3", "eagle3-short", "eagle3-long", "eagle3-throughput")

AXES: tuple[Axis, ...] = (
    Axis("moe_kernel", "--moe-kernel", _KERNELS, ("HALFBYTE_MOE_KERNEL", "VLLM_MXFP4_MOE_KERNEL"),
         "the kernel of the expert MLP, or one for each regime, for example decode=gemv,prefill=triton",
         {"gemm": "cutlass"}, True),
    Axis("linear_kernel", "--linear-kernel", _KERNELS, ("HALFBYTE_LINEAR_KERNEL",),
         "the kernel of qkv, o and lm_head, or one for each regime", {"gemm": "cutlass"}, True),
    Axis("activation", "--activation", ("auto", "float", "f32", "bf16", "int8", "fp8", "mxfp8", "mxfp4"),
         ("HALFBYTE_ACTIVATION", "VLLM_MXFP4_ACTIVATION"),
         "the format of activations in front of quantised matrices, or one for each regime, for example long=fp8; "
         "float is bf16 on a GPU and f32 on a CPU, auto the same on a GPU and int8 on a CPU", {}),
    Axis("layers", "--layers", ("auto", *LAYER_FORMATS), ("HALFBYTE_LAYERS", "VLLM_MXFP4_LAYERS"),
         "the format of every layer, or of each group of layers, for example qkv=q8,o=q8,lm_head=mxfp4; a kind of "
         "attention or a number names some layers of a group, for example qkv=mxfp4,qkv.full=q8,qkv.0=q8; auto is q8 "
         "for dense layers on a GPU, and the file's format on a CPU", {}),
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
         "CUDA graphs; --enforce-eager switches them off", {"1": "on", "0": "off"}, switch=True),
    Axis("cpu_instructions", "--cpu-instructions",
         ("auto", "avx512-amx", "avx512", "avx-vnni", "avx2", "neon-i8mm", "neon", "portable"),
         ("HALFBYTE_CPU_INSTRUCTIONS",), "the instruction set of the CPU kernels", {}),
    Axis("threads", "--threads", ("auto",), ("HALFBYTE_THREADS",),
         "threads of the CPU kernels: a number, or auto for the physical cores that this process may use", {}),
    Axis("experts_in_host", "--experts-in-host", ("auto", "all"), ("HALFBYTE_EXPERTS_IN_HOST",),
         "how many layers keep their experts in host memory although a GPU runs the model: a number, all, or auto for "
         "those that do not fit on the GPU", {}, spellings=("--n-cpu-moe",)),
    Axis("deterministic", "--deterministic", ("off", "on"), ("HALFBYTE_DETERMINISTIC",),
         "make greedy and seeded tokens independent of other requests, chunks, preemption, prefix hits, drafts and "
         "restarts; docs/deterministic.md lists what that fixes and what it costs", {"1": "on", "0": "off"},
         switch=True),
)  # fmt: skip
_BY_FIELD = {a.field: a for a in AXES}
NUMBERS = {"threads": 1, "experts_in_host": 0}  # axes that also take a number, and the least

# Values that were requested and will not be implemented, with the reason.
REFUSED: dict[tuple[str, str], str] = {
    ("activation", "fp6"): "the tensor cores hold FP6 in bytes of eight bits and multiply it no faster than FP8, so it "
    "has mxfp8's cost and fewer bits; use mxfp8",
}

# halfbyte's variables that are not gates. Value: their purpose (docs/env.md repeats it).
SETTINGS: dict[str, str] = {
    "HALFBYTE_PRESET": "preset to start from (as --preset)",
    "HALFBYTE_API_KEY": "API key that the server requires",
    "HALFBYTE_CACHE_DIR": "where compiled kernels, the list of running servers and the history of `chat` are kept "
    "(default: ~/.cache/halfbyte)",
    "HALFBYTE_CXX": "the C++ compiler of the CPU kernels (default: the first of c++, g++, clang++ in PATH)",
    "HALFBYTE_GPU_INSTRUCTIONS": "for tests: plan and compile for this older GPU architecture (sm80, sm86, sm89) and "
    "run it on the GPU that is here",
    "OMP_NUM_THREADS": "the most threads of the CPU kernels if --threads is auto, and of torch's own operations",
    "HALFBYTE_MODELS_DIR": "where `halfbyte pull` puts models (default: ~/.cache/halfbyte/models)",
}

# Variables of older stacks that nothing reads any more, with the flag that replaces each.
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
_PREFIXES = ("HALFBYTE_", "VLLM_MXFP4_")


@dataclass(frozen=True)
class Gates:
    moe_kernel: PerRegime = PerRegime()
    linear_kernel: PerRegime = PerRegime()
    activation: str = "auto"
    layers: Layers = AUTO_LAYERS
    tile: str = "auto"
    attention: str = "auto"
    sinks: str = "auto"
    kv_dtype: str = "auto"
    speculate: str = "off"
    graphs: str = "on"
    cpu_instructions: str = "auto"
    threads: str = "auto"
    experts_in_host: str = "auto"
    deterministic: str = "off"

    def __post_init__(self) -> None:
        """Check values from code like those from the command line."""
        for axis in AXES:
            object.__setattr__(self, axis.field, _checked(axis, getattr(self, axis.field)))

    def backend(self, axis: str, regime: str) -> str:
        """The gate value of a plan axis (moe, linear, attention) in a regime."""
        if axis == "attention":
            return self.attention
        per = self.moe_kernel if axis == "moe" else self.linear_kernel
        return cast(str, getattr(per, "prefill" if regime == "long" else regime))

    def activation_in(self, regime: str) -> str:
        """The activation format of a regime. `activation` is one value, or values for some regimes (long=fp8) and auto
        for the others. The value for prefill also applies to long prompts, unless they have their own."""
        if "=" not in self.activation:
            return self.activation
        formats = dict(part.split("=", 1) for part in self.activation.split(","))
        return formats.get(regime, formats.get("prefill", "auto") if regime == "long" else "auto")

    @property
    def layer_formats(self) -> dict[str, str]:
        """Group of layers -> the format that a flag or a preset names for it; checkpoint where none does. `auto` is
        resolved before this is read (`layers_on`), except inside vLLM, where it keeps the checkpoint's format. The
        layers that differ from their group stand behind it by their names: `format_of_layer` reads both."""
        groups = {group: "checkpoint" if f == "auto" else f for group, f in self.layers.groups.items()}
        return groups | dict(self.layers.exceptions)

    def as_dict(self) -> dict[str, str]:
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}

    def changes(self, base: Gates | None = None) -> dict[str, str]:
        """What differs from `base` (default: `auto` everywhere), axis -> value."""
        mine, other = self.as_dict(), (base or Gates()).as_dict()
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
    name = preset or env.get("HALFBYTE_PRESET")
    gates = _preset(name).gates if name else Gates()
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
        raise GateError("--layers and --mxfp4-layers set the same option; use only one of them.")
    if short is not None:
        gates = replace(gates, layers=_short_layers(short, "--mxfp4-layers"))
    for name, text in values_by_flag.items():
        if name not in _BY_FIELD:
            raise GateError(f"there is no gate {name!r}; the gates are {_list(a.flag for a in AXES)}.")
        gates = replace(gates, **{name: _value(_BY_FIELD[name], text, _BY_FIELD[name].flag)})
    return gates


def check_environment(env: Mapping[str, str]) -> None:
    variables = {v for a in AXES for v in a.variables} | set(SETTINGS)
    for name in sorted(env):
        if name in RETIRED:
            raise GateError(f"{name} is set, but nothing reads it any more; unset it and use {RETIRED[name]}.")
        if name.startswith(_PREFIXES) and name not in variables:
            raise GateError(f"the environment variable {name} is unknown{_near(name, variables)}; unset it.")


def setting(name: str, env: Mapping[str, str] | None = None) -> str | None:
    """A variable of SETTINGS, or None."""
    assert name in SETTINGS, name
    return (os.environ if env is None else env).get(name) or None


def cache_folder(kind: str) -> Path:
    """The folder for compiled code of a kind: cubin, emulator, cpu."""
    base = setting("HALFBYTE_CACHE_DIR")
    return (Path(base).expanduser() if base else Path.home() / ".cache" / "halfbyte") / kind


def models_folder() -> Path:
    """Where `halfbyte pull` puts models and looks for them."""
    base = setting("HALFBYTE_MODELS_DIR")
    return Path(base).expanduser() if base else Path.home() / ".cache" / "halfbyte" / "models"


_SECRET = re.compile(r"(_KEY|_TOKEN|_SECRET|_PASSWORD|_CREDENTIALS)$")


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a child process: this process's, without keys and tokens."""
    return {**{name: value for name, value in os.environ.items() if not _SECRET.search(name)}, **extra}


def export(variables: Mapping[str, str]) -> None:
    """Set variables for a library that this process is about to import."""
    os.environ.update(variables)


def inherited() -> Mapping[str, str]:
    """The environment of this process, to pass on to another program."""
    return dict(os.environ)


def preset_name(gates: Gates, *, gpu: bool, stored: Mapping[str, str] | None = None) -> str:
    """The preset that these gates are on such a device, threads and --deterministic apart; empty if none. Without a
    choice it is `DEFAULT_ON_GPU` or `DEFAULT_ON_CPU`, and `exact` on a GPU if the file has its dense layers
    quantised."""
    here = _settled(gates, gpu, stored)
    return next((name for name, preset in PRESETS.items() if _settled(preset.gates, gpu, stored) == here), "")


def as_stored(gates: Gates) -> Gates:
    """Gates under which `auto` keeps the file's formats of dense layers: on a CPU, inside vLLM, in other engines."""
    return replace(gates, layers=layers_on(gates, gpu=False))


def layers_on(gates: Gates, *, gpu: bool, stored: Mapping[str, str] | None = None) -> Layers:
    """The layers with what `auto` stands for in dense groups: on a GPU the format of the default preset; the file's
    format on a CPU, where the file has the group quantised already (`stored`: role -> format), and where a flag names
    narrower activations than bf16, which not every kernel multiplies with that format."""
    fitting = {gates.activation_in(regime) for regime in ACTIVATION_REGIMES} <= {"auto", "float", "bf16"}
    default = (PRESETS[DEFAULT_ON_GPU].gates.layers if gpu and fitting else Layers()).groups

    def format_of(group: str, form: str) -> str:
        if form != "auto":
            return form
        return default[group] if (stored or {}).get(group, "bf16") in UNQUANTISED else "checkpoint"

    moe, qkv, o, lm_head, exceptions = gates.layers
    return Layers(moe, format_of("qkv", qkv), format_of("o", o), format_of("lm_head", lm_head), exceptions)


def _settled(gates: Gates, gpu: bool, stored: Mapping[str, str] | None) -> Gates:
    """With the formats that `auto` stands for on a device; plan/select.py holds the same rule."""
    activation = ("float" if gpu else "int8") if gates.activation == "auto" else gates.activation
    kv = "f32" if activation == "float" and not gpu else "bf16"
    kv = kv if gates.kv_dtype == "auto" else gates.kv_dtype
    return replace(
        gates, activation=activation, kv_dtype=kv, layers=layers_on(gates, gpu=gpu, stored=stored),
        threads="auto", cpu_instructions="auto", deterministic="off", experts_in_host="auto",
    )  # fmt: skip


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
        usual = {"long": parts.get("prefill", "auto")}  # defaults, which are omitted
        pairs = [f"{r}={parts[r]}" for r in ACTIVATION_REGIMES if r in parts and parts[r] != usual.get(r, "auto")]
        return ",".join(pairs) or "auto"
    if axis.per_regime and "=" in text:
        parts = dict(_pairs(text, where, REGIME_NAMES, "regime"))
        return PerRegime(*(_single_value(axis, parts.get(r, "auto"), where) for r in REGIME_NAMES))
    least = NUMBERS.get(axis.field)
    if least is not None and text.isdigit() and int(text) >= least:
        return str(int(text))
    value = _single_value(axis, text, where)
    return PerRegime(value, value, value) if axis.per_regime else value


def _checked(axis: Axis, value: Any) -> Any:
    """A field's value of Gates, from that type or from text."""
    where = f"Gates({axis.field}=...)"
    if isinstance(value, str):
        return _value(axis, value, where)
    if isinstance(value, Layers):
        return _layer_formats(value.groups | dict(value.exceptions), where)
    kind: Any = PerRegime if axis.per_regime else None
    if kind is None or not isinstance(value, tuple | list) or len(value) != len(kind._fields):
        raise GateError(f"{where} is {value!r}; use text, such as {axis.values[0]!r}.")
    if not all(isinstance(part, str) for part in value):
        raise GateError(f"{where} is {value!r}; each of its parts must be text.")
    return kind(*(_single_value(axis, part.strip().lower(), where) for part in value))


def _single_value(axis: Axis, text: str, where: str) -> str:
    text = axis.aliases.get(text, text)
    if (axis.field, text) in REFUSED:
        raise GateError(f"{where} is {text!r}: {REFUSED[axis.field, text]}.")
    if text not in axis.values:
        number = f" or a number from {NUMBERS[axis.field]} on" if axis.field in NUMBERS else ""
        choices = f"{' or '.join(axis.values)}{number}" if number else f"one of {_list(axis.values)}"
        raise GateError(f"{where} is {text!r}{_near(text, axis.values)}; use {choices}.")
    return text


def _layers(text: str, where: str) -> Layers:
    if text == "auto":
        return AUTO_LAYERS
    if "=" not in text and text not in LAYER_FORMATS:
        return _short_layers(text, where)
    if text in LAYER_FORMATS:
        return Layers() if text == "checkpoint" else Layers(text, text, text, text)
    numbered = [name for name in re.findall(r"[a-z_]+\.[0-9]+", text) if _LAYER_NAME.fullmatch(name)]
    names = (*LAYER_GROUPS, *(f"{group}.{kind}" for group in _IN_LAYERS for kind in LAYER_KINDS), *numbered)
    return _layer_formats(dict(_pairs(text, where, names, "layer group")), where)


_IN_LAYERS = tuple(group for group in LAYER_GROUPS if group != "lm_head")
_LAYER_NAME = re.compile(rf"({'|'.join(_IN_LAYERS)})\.({'|'.join(LAYER_KINDS)}|0|[1-9][0-9]*)")


def _layer_formats(chosen: Mapping[str, str], where: str) -> Layers:
    """From names and formats; the exceptions are in one order, so that equal choices are equal."""
    default = Layers().groups
    for name, form in chosen.items():
        if name not in LAYER_GROUPS and not _LAYER_NAME.fullmatch(name):
            raise GateError(f"{where}: {name!r} is not a layer group or a part of one, such as qkv.full or qkv.0.")
        if form not in LAYER_FORMATS and not (form == "auto" and name in LAYER_GROUPS):
            raise GateError(f"{where}: {name}={form!r} is not a layer format; use one of {_list(LAYER_FORMATS)}.")
    groups = {group: chosen[group] for group in LAYER_GROUPS if group in chosen}
    others = [(name, form) for name, form in chosen.items() if name not in groups]
    kinds = sorted((n, f) for n, f in others if n.partition(".")[2] in LAYER_KINDS)
    kinds = [(n, f) for n, f in kinds if f != groups.get(n.partition(".")[0], "checkpoint")]
    numbers = sorted((n, f) for n, f in others if n.partition(".")[2].isdigit())
    numbers.sort(key=lambda pair: (pair[0].partition(".")[0], int(pair[0].partition(".")[2])))
    moe, qkv, o, lm_head = (default | groups).values()
    return Layers(moe, qkv, o, lm_head, (*kinds, *numbers))


def _short_layers(text: str, where: str) -> Layers:
    groups = [g.strip() for g in text.lower().split(",") if g.strip()]
    if groups == ["all"]:
        return _ALL_MXFP4
    if not groups:
        raise GateError(f"{where} is empty; use {_list(LAYER_GROUPS)}, or all.")
    for group in groups:
        if group not in LAYER_GROUPS:
            raise GateError(f"{where}: {group!r} is not a layer group; use {_list(LAYER_GROUPS)}, or all.")
    return _layer_formats(dict.fromkeys(groups, "mxfp4"), where)


def _pairs(text: str, where: str, keys: tuple[str, ...], kind: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, sign, value = (s.strip() for s in part.partition("="))
        if not sign or not value or key not in keys:
            raise GateError(f"{where}: {part!r} is not {kind}=value; the {kind}s are {_list(keys)}.")
        if key in dict(out):
            raise GateError(f"{where} names {key} twice.")
        out.append((key, value))
    return out


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _near(text: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(text, list(candidates), n=1)
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
    "exact": Preset(
        Gates(activation="float", layers=Layers()), "weights as the checkpoint has them, float activations"
    ),
    "int8": Preset(
        Gates(activation="int8", layers=Layers(), kv_dtype="bf16"),
        "weights as the checkpoint has them, 8-bit activations",
    ),
    "balanced": Preset(
        Gates(layers=Layers(qkv="q8", o="q8", lm_head="q8")), "dense layers in 8 bits, as in llama.cpp's official files"
    ),
    "mixed": Preset(
        Gates(layers=_ALL_MXFP4._replace(exceptions=(("qkv.full", "q8"),))),
        "every layer in MXFP4, except qkv of the full-attention layers in 8 bits, for long contexts",
    ),
    "fast": Preset(Gates(layers=_ALL_MXFP4), "every layer in MXFP4"),
    "baseline": Preset(
        Gates(moe_kernel=_MARLIN, activation="bf16", layers=Layers()), "what upstream vLLM does: Marlin, bf16"
    ),
    "a": Preset(Gates(moe_kernel=_CUTLASS, activation="mxfp8", layers=Layers()), "CUTLASS, mxfp8"),
    "b": Preset(Gates(moe_kernel=_CUTLASS, activation="mxfp8", layers=Layers(), sinks="on"), "A with sinks asked for"),
    "c": Preset(
        Gates(
            moe_kernel=_CUTLASS, activation="mxfp8", layers=Layers(), sinks="on", speculate="eagle3-short", graphs="off"
        ),
        "B with the short-context EAGLE-3 head, eager",
    ),
    "d": Preset(
        Gates(moe_kernel=_CUTLASS, activation="mxfp8", layers=Layers(), speculate="eagle3-long"),
        "A with the long-context EAGLE-3 head",
    ),
    "e": Preset(
        Gates(moe_kernel=_CUTLASS, activation="mxfp8", layers=Layers(), speculate="eagle3-throughput"),
        "A with the throughput EAGLE-3 head",
    ),
    "f": Preset(Gates(moe_kernel=_GEMV, activation="bf16", layers=Layers()), "GEMV decode, bf16"),
}

# Without a flag, a variable or a preset. `balanced` is the precision of llama.cpp's official files.
DEFAULT_ON_GPU, DEFAULT_ON_CPU = "balanced", "int8"
