"""Spans of known lengths come out as the profile one would write by hand; the rules say what their limits say."""

from __future__ import annotations

import pytest

from halfbyte.lab import timeline
from halfbyte.lab.profile import Profile, Span, category_of, classify, decide, summarise
from halfbyte.lab.timeline import Kernel, match, owner
from halfbyte.model import load
from halfbyte.plan.phase import LAYER, OPERATIONS
from halfbyte.roofline import GPUS, Work

H200 = GPUS["h200"]
NONE = dict.fromkeys(OPERATIONS, Work())


def spans(*given: tuple[str, float, float]) -> list[Span]:
    return [Span(name, name, start, end) for name, start, end in given]


def profile_of(shares: dict[str, float], idle: float = 0.0) -> Profile:
    at, found = 0.0, []
    for name, us in shares.items():
        found.append(Span(name, name, at, at + us))
        at += us
    found.append(Span("other", "late", at + idle, at + idle))
    return summarise("x", 1, found, 1, at + idle, NONE, H200, "")


def test_time_rate_and_share_of_the_ceiling() -> None:
    work = NONE | {"moe": Work(bytes=450e6, flops=1.0), "lm_head": Work(bytes=1.0, flops=7.9e9)}
    p = summarise("x", 1, spans(("MoE", 0, 200), ("lm_head", 200, 240)), 1, 240.0, work, H200, "")
    moe, head = p.lines
    assert (moe.us, moe.bound, moe.of_ceiling) == (200, "memory", pytest.approx(0.5))
    assert moe.gb_per_s == pytest.approx(2250)
    assert moe.of_step == pytest.approx(200 / 240)
    assert (head.bound, head.of_ceiling) == ("compute", pytest.approx(0.25))
    assert head.tflop_per_s == pytest.approx(197.5)


def test_steps_are_averaged_and_gaps_counted() -> None:
    """Two steps of 10 + 5, a gap of 2 inside each, one of 3 between; kernels that overlap are busy once."""
    p = summarise(
        "x", 1, spans(("qkv", 0, 10), ("o", 12, 17), ("qkv", 20, 30), ("o", 32, 37), ("o", 33, 36)), 2, 18.0, NONE,
        H200, "",
    )  # fmt: skip
    assert {line.category: line.us for line in p.lines} == {"qkv": 10, "o": 5}
    assert p.launches == 2.5
    assert p.busy_us == pytest.approx(15)
    assert p.idle_us == pytest.approx(3.5)
    assert p.gaps == 1.5
    assert p.longest_gap_us == 3


def test_a_kernel_that_starts_early_counts_from_when_the_one_before_it_ends() -> None:
    p = summarise("x", 1, spans(("o", 6, 14), ("qkv", 0, 10), ("MoE", 12, 13)), 1, 14.0, NONE, H200, "")
    assert {line.category: line.us for line in p.lines} == {"qkv": 10, "o": 4, "MoE": 0}
    assert sum(line.us for line in p.lines) == pytest.approx(p.busy_us)


def test_a_whole_step_is_divided() -> None:
    p = summarise(
        "x", 1, spans(("whole step", 0, 100), ("sampling", 100, 110)), 1, 110.0, NONE, H200, "",
        {"whole step": {"qkv + rope/KV": 1, "MoE": 3}},
    )  # fmt: skip
    assert {line.category: line.us for line in p.lines} == {"qkv + rope/KV": 25, "MoE": 75, "sampling": 10}


def test_categories() -> None:
    assert category_of(("attn_norm", "qkv")) == "qkv"
    assert category_of(("attn_norm", "qkv", "rope", "kv_write")) == "qkv + rope/KV"
    assert category_of(OPERATIONS).split(" + ")[0] == "embed"
    assert classify(["group_rows", "pack_rows", "grouped", "grouped", "sum_rows"], ("moe",)) == [
        "packing", "packing", "MoE", "MoE", "packing"
    ]  # fmt: skip
    assert classify(["quantize_kernel_0d1d", "linear_kernel"], ("qkv",)) == ["packing", "qkv"]


def test_a_phase_that_is_a_whole_layer_is_divided() -> None:
    kernels = ["batch_finish", "batch_product", "rope_kernel", "decode_kernel", "merge_kernel", "batch_product",
               "batch_choose", "batch_product", "batch_product"]  # fmt: skip
    assert classify(kernels, LAYER) == [
        "packing", "qkv", "rope/KV", "attention", "attention", "o", "router", "MoE", "MoE"
    ]  # fmt: skip
    # one product too few: nobody can say which, and what has a name keeps it
    odd = classify(kernels[:-1], LAYER)
    assert odd[1] == odd[5] == odd[7] == category_of(LAYER)
    assert odd[3] == "attention"
    # the experts in one launch, which has a name
    assert classify([*kernels[:-2], "batch_experts"], LAYER)[-1] == "MoE"
    assert classify([*kernels[:-2], "batch_experts"], LAYER)[:-1] == classify(kernels, LAYER)[:-2]


@pytest.mark.parametrize(
    ("shares", "idle", "applying"),
    [
        ({"MoE": 51, "attention": 20, "o": 29}, 0, {"MoE > 50%"}),
        ({"MoE": 49, "attention": 41, "o": 10}, 0, {"attention > 40%"}),
        ({"MoE": 45, "attention": 39, "o": 5, "packing": 11}, 0, {"quantisation and packing > 10%"}),
        ({"MoE": 40, "attention": 30, "o": 20, "packing": 10}, 0, set()),
        ({"MoE": 40, "o": 40}, 10, {"idle > 10%"}),
    ],
)
def test_the_decision_table(shares: dict[str, float], idle: float, applying: set[str]) -> None:
    found = decide(profile_of(shares, idle))
    assert {v.rule for v in found if v.applies} == applying
    assert all(v.sentence.endswith(".") for v in found)


def test_a_kernel_nobody_asked_for_is_named() -> None:
    found = {v.rule: v for v in decide(profile_of({"MoE": 1}), reference=["reference.moe"])}
    assert found["another kernel than the one asked for"].applies
    assert "reference.moe" in found["another kernel than the one asked for"].sentence


def test_the_next_bottleneck_is_the_time_above_the_floor() -> None:
    """lm_head is slower against its ceiling, but MoE loses more."""
    work = NONE | {"moe": Work(bytes=450e6), "lm_head": Work(bytes=4.5e6)}
    p = summarise("x", 1, spans(("MoE", 0, 200), ("lm_head", 200, 210)), 1, 210.0, work, H200, "")
    last = decide(p)[-1]
    assert last.rule == "next"
    assert "MoE" in last.sentence
    assert "100 us above" in last.sentence


def test_kernels_are_matched_by_name_and_order() -> None:
    owners = [("gemm", "qkv"), ("pack", "packing"), ("gemm", "o")]
    order = ["gemm", "pack", "gemm", "argmax"] * 2
    found = match(owners, [Kernel(n, i, i + 1) for i, n in enumerate(order)], 2)
    assert [s.category for s in found] == ["qkv", "packing", "o", "sampling"] * 2
    # one gemm too many: nobody can say whose it is
    odd = match(owners, [Kernel(n, i, i + 1) for i, n in enumerate([*order, "gemm"])], 2)
    assert {s.category for s in odd if s.name == "gemm"} == {"other"}
    assert {s.category for s in odd if s.name == "pack"} == {"packing"}


def test_a_kernel_belongs_to_the_mark_around_it() -> None:
    marks = [(0, 0.0, 10.0), (1, 12.0, 20.0)]
    assert owner(Kernel("a", 4, 8), marks) == 0
    assert owner(Kernel("a", 10.2, 10.4), marks) == 0
    assert owner(Kernel("a", 11.8, 12.6), marks) == 1


def test_the_embedded_model_on_a_cpu() -> None:
    model = load.load_model(load.resolve_model(None))
    decode = timeline.decode_profile(model, 2, 70, 2)
    assert {line.category for line in decode.lines} == {
        "embed", "qkv", "rope/KV", "attention", "o", "router", "MoE", "lm_head", "sampling"
    }  # fmt: skip
    assert decode.launches == len(model.plan.bound["decode"]) + 1
    assert sum(line.of_step for line in decode.lines) == pytest.approx(1, abs=0.05)
    assert any("distinct experts" in note for note in decode.notes)
    prompt = timeline.prefill_profile(model, 70, runs=1)
    assert prompt.rows == 70
    assert list(prompt.phases) == ["prefill"]
