"""Gates from flags, environment and presets: every value, every error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfbyte import gates
from halfbyte.errors import GateError
from halfbyte.gates import (
    AXES,
    DEFAULT_ON_CPU,
    DEFAULT_ON_GPU,
    PRESETS,
    RETIRED,
    Gates,
    Layers,
    PerRegime,
    as_stored,
    layers_on,
    parse,
    preset_name,
)
from halfbyte.plan.phase import ARCHES
from halfbyte.plan.select import values_of


@pytest.mark.parametrize("axis", AXES, ids=lambda a: a.field)
def test_every_value_is_read_from_flag_and_from_each_variable(axis: gates.Axis) -> None:
    for value in (*axis.values, *axis.aliases):
        by_flag = parse({axis.field: value}, env={})
        assert parse({axis.field: value.upper()}, env={}) == by_flag
        for variable in axis.variables:
            assert parse({}, env={variable: value}) == by_flag
        others = {k: v for k, v in by_flag.changes().items() if k != axis.field}
        assert not others, "an axis never forces another"


@pytest.mark.parametrize("axis", AXES, ids=lambda a: a.field)
def test_unknown_values_are_errors_that_list_the_known_ones(axis: gates.Axis) -> None:
    with pytest.raises(GateError) as e:
        parse({axis.field: "nvfp4"}, env={})
    assert axis.flag in str(e.value)
    with pytest.raises(GateError, match=axis.variables[0]):
        parse({}, env={axis.variables[0]: "nonsense"})


def test_near_misses_are_named() -> None:
    with pytest.raises(GateError, match="did you mean triton"):
        parse({"moe_kernel": "trition"}, env={})
    with pytest.raises(GateError, match="did you mean VLLM_MXFP4_LAYERS"):
        parse({}, env={"VLLM_MXFP4_LAYER": "moe"})


@pytest.mark.parametrize("name", RETIRED)
def test_retired_variables_name_todays_flag(name: str) -> None:
    with pytest.raises(GateError) as e:
        parse({}, env={name: "1"})
    assert name in str(e.value)
    assert "--" in str(e.value)


def test_unknown_variables_of_ours_are_errors_and_foreign_ones_are_not() -> None:
    for name in ("HALFBYTE_TYPO", "VLLM_MXFP4_SOMETHING"):
        with pytest.raises(GateError, match=name):
            parse({}, env={name: "1"})
    assert parse({}, env={"VLLM_LOGGING_LEVEL": "DEBUG", "FLASHINFER_LOGLEVEL": "3", "PATH": "x"}) == Gates()


def test_precedence_flag_environment_preset() -> None:
    env = {"VLLM_MXFP4_ACTIVATION": "int8"}
    assert parse({}, env=env, preset="a").activation == "int8"
    assert parse({"activation": "fp8"}, env=env, preset="a").activation == "fp8"
    assert parse({}, env={"HALFBYTE_PRESET": "A"}).activation == "mxfp8"
    with pytest.raises(GateError, match="disagree"):
        parse({}, env={"VLLM_MXFP4_ACTIVATION": "int8", "HALFBYTE_ACTIVATION": "fp8"})


def test_per_regime() -> None:
    assert parse({"moe_kernel": "decode=gemv, prefill=Triton"}, env={}).moe_kernel == PerRegime(
        "gemv", "auto", "triton"
    )
    for bad in ("decode=", "decode=gemv,decode=gemv", "always=gemv", "decode=foo"):
        with pytest.raises(GateError):
            parse({"moe_kernel": bad}, env={})


def test_layers() -> None:
    assert parse({"layers": "qkv=q8,o=q8"}, env={}).layers == Layers("auto", "q8", "q8", "checkpoint")
    for text in ("auto", "checkpoint", "moe=checkpoint", "moe=mxfp4,o=q8", "qkv=auto"):
        layers = parse({"layers": text}, env={}).layers
        assert str(layers) == text
        assert Gates(layers=str(layers)).layers == Gates(layers=layers).layers == layers  # type: ignore[arg-type]
    assert parse({"layers": "moe=checkpoint"}, env={}).layers != Layers()
    assert Gates().layer_formats["moe"] == "checkpoint"
    assert parse({"mxfp4_layers": "moe,qkv,o,lm_head"}, env={}).layers == PRESETS["fast"].gates.layers
    assert parse({}, env={"VLLM_MXFP4_LAYERS": "moe,lm_head"}).layers == Layers("mxfp4", lm_head="mxfp4")
    for flags in ({"layers": "qkv=nvfp4"}, {"layers": "embed=q8"}, {"mxfp4_layers": "embed"}):
        with pytest.raises(GateError):
            parse(flags, env={})
    with pytest.raises(GateError, match="only one"):
        parse({"layers": "q8", "mxfp4_layers": "qkv"}, env={})


@pytest.mark.parametrize(
    ("text", "exceptions", "printed"),
    [
        ("qkv=mxfp4,qkv.full=q8", (("qkv.full", "q8"),), "qkv=mxfp4,qkv.full=q8"),
        ("qkv.sliding=mxfp4", (("qkv.sliding", "mxfp4"),), "qkv.sliding=mxfp4"),
        ("qkv=q8, QKV.full=q8", (), "qkv=q8"),
        ("o.11=q8,o.2=mxfp4", (("o.2", "mxfp4"), ("o.11", "q8")), "o.2=mxfp4,o.11=q8"),
    ],
)
def test_some_layers_of_a_group_may_have_another_format(text: str, exceptions: tuple[Any, ...], printed: str) -> None:
    chosen = parse({"layers": text}, env={})
    assert chosen.layers.exceptions == exceptions
    assert chosen.changes() == {"layers": printed}
    assert parse(chosen.changes(), env={}) == chosen
    assert Gates(layers=chosen.layers) == chosen


def test_the_number_of_a_layer_goes_before_its_kind_and_that_before_the_group() -> None:
    formats = parse({"layers": "qkv=mxfp4,qkv.full=q8,qkv.3=checkpoint"}, env={}).layer_formats
    kinds = ("sliding", "full") * 3
    named = [gates.format_of_layer(formats, "qkv", i, kind) for i, kind in enumerate(kinds)]
    assert named == ["mxfp4", "q8", "mxfp4", "checkpoint", "mxfp4", "q8"]
    assert gates.format_of_layer(formats, "o", 0, "sliding") == "checkpoint"


@pytest.mark.parametrize("text", ["lm_head.full=q8", "qkv.wide=q8", "qkv.full=q9", "qkv.01=q8", "o.full=q8,o.full=q8"])
def test_names_of_layers_are_checked(text: str) -> None:
    with pytest.raises(GateError, match="--layers"):
        parse({"layers": text}, env={})
    with pytest.raises(GateError, match="wide"):
        Gates(layers=Layers(exceptions=(("qkv.wide", "q8"),)))


def test_presets_print_what_they_change() -> None:
    assert Gates().changes() == parse({}, env={}).changes() == {}
    assert PRESETS["exact"].gates.changes() == {"activation": "float", "layers": "checkpoint"}
    assert PRESETS["fast"].gates.changes() == {"layers": "moe=mxfp4,qkv=mxfp4,o=mxfp4,lm_head=mxfp4"}
    assert set(PRESETS) == {"exact", "int8", "balanced", "mixed", "fast", "baseline", "a", "b", "c", "d", "e", "f"}
    with pytest.raises(GateError, match="no preset 'quick'"):
        parse({}, env={}, preset="quick")


def test_every_variable_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "env.md").read_text(encoding="utf-8")
    names = {v for a in AXES for v in a.variables} | set(gates.SETTINGS) | set(RETIRED)
    assert not [n for n in names if f"`{n}`" not in text]


@pytest.mark.parametrize("axis", AXES, ids=lambda a: a.field)
def test_gates_made_by_code_are_held_to_the_same_values(axis: gates.Axis) -> None:
    for value in (*axis.values, *axis.aliases):
        assert Gates(**{axis.field: value.upper()}) == parse({axis.field: value}, env={})  # type: ignore[arg-type]
    for bad in ("nvfp4", "", 1, None, True, ("auto",), ("nvfp4",) * 3, ("nvfp4",) * 4, (1, 2, 3)):
        with pytest.raises(GateError, match=axis.field):
            Gates(**{axis.field: bad})  # type: ignore[arg-type]


def test_gates_without_sinks_are_without_sinks() -> None:
    assert Gates(sinks="OFF").sinks == "off"
    assert Gates(moe_kernel=("gemv", "auto", "auto")).moe_kernel == PerRegime("gemv")  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHES)
def test_exact_rounds_nothing_on_any_device(arch: str) -> None:
    target = ARCHES[arch]
    exact = values_of(PRESETS["exact"].gates, target)
    wide = "bf16" if target.is_gpu else "f32"
    assert (exact.activation, exact.activations, exact.kv_dtype, exact.dtype) == (wide, {}, wide, wide)
    chosen = values_of(Gates(), target)
    name = preset_name(Gates(), gpu=target.is_gpu)
    assert name == (DEFAULT_ON_GPU if target.is_gpu else DEFAULT_ON_CPU)
    assert chosen == values_of(PRESETS[name].gates, target)
    assert chosen == values_of(parse({}, {}), target)


def test_the_default_on_a_gpu_holds_dense_layers_in_8_bits() -> None:
    balanced = PRESETS["balanced"].gates.layers
    assert (DEFAULT_ON_GPU, DEFAULT_ON_CPU) == ("balanced", "int8")
    assert layers_on(Gates(), gpu=True) == layers_on(Gates(kv_dtype="fp8"), gpu=True) == balanced
    assert layers_on(Gates(), gpu=False) == as_stored(Gates()).layers == Layers()
    for named in ("checkpoint", "qkv=q8", "o=mxfp4"):  # a group that a flag does not name stays as the file has it
        layers = parse({"layers": named}, env={}).layers
        assert layers_on(Gates(layers=layers), gpu=True) == layers
    for activation in ("fp8", "mxfp8", "long=fp8", "int8"):  # what was typed runs, with the dense layers as before
        assert layers_on(Gates(activation=activation), gpu=True) == Layers()


def test_the_default_keeps_what_a_file_has_quantised() -> None:
    stored = {"qkv": "q8", "o": "mxfp4", "lm_head": "q8", "gate_up": "mxfp4", "down": "mxfp4", "embed": "bf16"}
    assert layers_on(Gates(), gpu=True, stored=stored) == Layers()
    assert preset_name(Gates(), gpu=True, stored=stored) == "exact"
    assert layers_on(Gates(), gpu=True, stored=stored | {"o": "f16"}) == Layers(o="q8")
    assert preset_name(Gates(), gpu=True, stored=stored | {"o": "f16"}) == ""


def test_a_preset_is_named_by_its_gates() -> None:
    for gpu in (True, False):
        for name, preset in PRESETS.items():
            assert preset_name(preset.gates, gpu=gpu) == name
        assert preset_name(Gates(speculate="ngram"), gpu=gpu) == ""
    assert preset_name(Gates(threads="2"), gpu=False) == "int8"
    assert preset_name(Gates(activation="f32"), gpu=False) == ""
