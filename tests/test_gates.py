"""Gates from flags, environment and presets: every value, every error."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte import gates
from halfbyte.errors import GateError
from halfbyte.gates import AXES, PRESETS, RETIRED, Gates, Layers, PerRegime, parse


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
    assert parse({"layers": "qkv=q8,o=q8"}, env={}).layers == Layers("checkpoint", "q8", "q8", "checkpoint")
    assert parse({"mxfp4_layers": "moe,qkv,o,lm_head"}, env={}).layers == PRESETS["fast"].gates.layers
    assert parse({}, env={"VLLM_MXFP4_LAYERS": "moe,lm_head"}).layers == Layers("mxfp4", lm_head="mxfp4")
    for flags in ({"layers": "qkv=nvfp4"}, {"layers": "embed=q8"}, {"mxfp4_layers": "embed"}):
        with pytest.raises(GateError):
            parse(flags, env={})
    with pytest.raises(GateError, match="only one"):
        parse({"layers": "q8", "mxfp4_layers": "qkv"}, env={})


def test_presets_print_what_they_change() -> None:
    assert PRESETS["exact"].gates.changes() == {}
    assert PRESETS["fast"].gates.changes() == {"layers": "moe=mxfp4,qkv=mxfp4,o=mxfp4,lm_head=mxfp4"}
    assert set(PRESETS) == {"exact", "balanced", "fast", "baseline", "a", "b", "c", "d", "e", "f"}
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
