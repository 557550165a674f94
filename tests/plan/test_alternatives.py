"""A failure to plan ends with flags, and with them there is a plan."""

from __future__ import annotations

import shlex

import pytest

from halfbyte.errors import PlanError
from halfbyte.gates import AXES, Gates, parse
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, choose
from halfbyte.plan.alternatives import alternatives
from halfbyte.plan.phase import ARCHES

FIELDS = {axis.flag: axis.field for axis in AXES}
HALF = {"qkv": "f16", "o": "f16", "lm_head": "f16", "embed": "f16"}
CASES = {
    "dense float16": ({"layers": "checkpoint"}, HALF, "--layers qkv=q8,o=q8,lm_head=q8"),
    "one matrix in float32": ({"layers": "checkpoint"}, {"o": "f32"}, "--layers o=q8"),
    "experts in float16": ({"layers": "moe=checkpoint"}, {"gate_up": "f16", "down": "f16"}, "--layers moe=mxfp4"),
    "both": (
        {"layers": "moe=checkpoint"}, HALF | {"gate_up": "f16", "down": "f16"},
        "--layers moe=mxfp4,qkv=q8,o=q8,lm_head=q8",
    ),
    "a kernel for CPUs": ({"moe_kernel": "cpu"}, {}, "--moe-kernel auto"),
    "an activation": ({"activation": "f32"}, {}, "--activation auto"),
    "two axes": ({"moe_kernel": "cpu", "attention": "flash_attn"}, {}, "--moe-kernel auto --attention auto"),
    "three axes": (
        {"moe_kernel": "cpu", "linear_kernel": "cpu", "attention": "cpu"}, {},
        "--moe-kernel auto --linear-kernel auto --attention auto",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", ["sm90", "sm121", "sm100", "sm86"])
def test_the_flags_of_a_failure_work(name: str, arch: str) -> None:
    flags, formats, expected = CASES[name]
    config, stored = NAMED["20b"], CHECKPOINT_FORMATS | formats
    with pytest.raises(PlanError) as caught:
        choose(config, parse(flags, env={}), ARCHES[arch], stored)
    assert str(caught.value).splitlines()[-1] == f"Use {expected}."
    words = shlex.split(expected)
    changed = flags | {FIELDS[flag]: value for flag, value in zip(words[::2], words[1::2])}
    choose(config, parse(changed, env={}), ARCHES[arch], stored)


def test_what_no_flag_helps_is_said() -> None:
    config = NAMED["20b"].with_(hidden=2890, head_dim=60)  # rows of no whole groups
    with pytest.raises(PlanError, match="No flag makes it run on sm90"):
        choose(config, Gates(), ARCHES["sm90"])


def test_the_smallest_change_comes_first() -> None:
    gates = parse({"moe_kernel": "cpu", "attention": "triton"}, env={})
    texts = [text for text, _ in alternatives(gates, CHECKPOINT_FORMATS)]
    assert texts.index("--moe-kernel auto") < texts.index("--moe-kernel auto --attention auto")
    assert len(texts) == len(set(texts))
    assert all(other != gates for _, other in alternatives(gates, CHECKPOINT_FORMATS))
