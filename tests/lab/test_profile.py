"""Spans of known lengths come out as the profile one would write by hand; the rules say what their limits say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfbyte.errors import AccountError
from halfbyte.lab import timeline
from halfbyte.lab.profile import LABELS, Profile, ProfileRow, Span, decide, summarise
from halfbyte.lab.timeline import match
from halfbyte.lab.trace import Interval
from halfbyte.model import load
from halfbyte.plan.launches import OTHER, PACKING, SAMPLING
from halfbyte.plan.phase import LAYER, OPERATIONS
from halfbyte.roofline import GPUS, Work
from tests.reference import REFERENCE

H200 = GPUS["h200"]
NONE = dict.fromkeys(OPERATIONS, Work())


ROWS = {
    label: ProfileRow({"MoE": "moe", "attention": "attention"}.get(label, "linear"), ops)
    for label, ops in LABELS.items()
}
ROWS |= {"sampling": ProfileRow.of(SAMPLING), "packing": ProfileRow.of(PACKING), "other": ProfileRow.of(OTHER)}


def spans(*pieces: tuple[str, float, float]) -> list[Span]:
    return [Span(ROWS[name], name, start, end) for name, start, end in pieces]


def profile_of(shares: dict[str, float], idle: float = 0.0) -> Profile:
    at, found = 0.0, []
    for name, us in shares.items():
        found.append(Span(ROWS[name], name, at, at + us))
        at += us
    found.append(Span(ROWS["other"], "late", at + idle, at + idle))
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
    assert {line.label: line.us for line in p.lines} == {"qkv": 10, "o": 5}
    assert p.launches == 2.5
    assert p.busy_us == pytest.approx(15)
    assert p.idle_us == pytest.approx(3.5)
    assert p.gaps == 1.5
    assert p.longest_gap_us == 3


def test_a_kernel_that_starts_early_counts_from_when_the_one_before_it_ends() -> None:
    p = summarise("x", 1, spans(("o", 6, 14), ("qkv", 0, 10), ("MoE", 12, 13)), 1, 14.0, NONE, H200, "")
    assert {line.label: line.us for line in p.lines} == {"qkv": 10, "o": 4, "MoE": 0}
    assert sum(line.us for line in p.lines) == pytest.approx(p.busy_us)


def test_a_whole_step_is_divided() -> None:
    p = summarise(
        "x", 1, [Span(ProfileRow("moe", OPERATIONS), "decode_step", 0, 100), *spans(("sampling", 100, 110))], 1, 110.0,
        NONE, H200, "", {ProfileRow("moe", OPERATIONS): {timeline.row_labelled("qkv + rope/KV"): 1, ROWS["MoE"]: 3}},
    )  # fmt: skip
    assert {line.label: line.us for line in p.lines} == {"qkv + rope/KV": 25, "MoE": 75, "sampling": 10}


def test_labels() -> None:
    assert ProfileRow("linear", ("attn_norm", "qkv")).label == "qkv"
    assert ProfileRow("linear", ("attn_norm", "qkv", "rope", "kv_write")).label == "qkv + rope/KV"
    assert ProfileRow("moe", OPERATIONS).label.startswith("embed + qkv")
    assert ProfileRow.of(PACKING).label == "packing"
    assert ProfileRow("router").label == "router"


def test_a_norm_and_the_product_behind_it_are_one_row() -> None:
    work = NONE | {"attn_norm": Work(bytes=4.5e6), "qkv": Work(bytes=40.5e6)}
    found = [Span(ProfileRow("norm", ("attn_norm",)), "n", 0, 5), Span(ProfileRow("linear", ("qkv",)), "q", 5, 20)]
    (line,) = summarise("x", 1, found, 1, 20.0, work, H200, "").lines
    assert (line.label, line.category, line.us, line.launches) == ("qkv", "linear", 20, 2)
    assert line.of_ceiling == pytest.approx(0.5)


# ---- an account that is wrong is refused ----------------------------------------------------------------------------


def test_a_row_faster_than_the_machine_is_an_error() -> None:
    """As it was: small kernels of torch inside a fused layer had the whole layer's work on their account."""
    layer = ProfileRow("moe", LAYER)
    work = NONE | {"moe": Work(bytes=60e9)}
    with pytest.raises(AccountError, match=r"took 41.8 us, .* take 13333.3 us at least on H200, .* 31898% of its ceil"):
        summarise("prompt of 2048", 2048, [Span(layer, "index", 0, 41.8)], 1, 41.8, work, H200, "")
    found = summarise("x", 1, [Span(layer, "all", 0, 13400)], 1, 13400.0, work, H200, "")
    assert found.lines[0].of_ceiling == pytest.approx(0.995, abs=1e-3)


def test_an_operation_on_two_accounts_is_an_error() -> None:
    """As it was: keys were written by the product of qkv, and the kernel that makes angles had their bytes."""
    found = [
        Span(ProfileRow("linear", ("qkv", "rope", "kv_write")), "grouped", 0, 10),
        Span(ProfileRow("attention", ("rope",)), "a", 10, 12),
    ]
    with pytest.raises(AccountError, match=r"rope is on the account of two rows, qkv \+ rope/KV and rope/KV"):
        summarise("x", 1, found, 1, 12.0, NONE, H200, "")


def test_inside_one_kernel_a_row_served_in_its_neighbours_time_is_one_with_it() -> None:
    work = NONE | {"o": Work(bytes=45e6), "router": Work(bytes=4.5e6), "moe": Work(bytes=90e6)}  # 10, 1 and 20 us
    whole = ProfileRow("moe", OPERATIONS)
    parts = {
        ProfileRow("linear", ("o",)): 8.0,
        ProfileRow("router", ("router",)): 6.0,
        ProfileRow("moe", ("moe",)): 40.0,
    }
    p = summarise("x", 1, [Span(whole, "decode_step", 0, 54)], 1, 54.0, work, H200, "", {whole: parts})
    assert {line.label: line.us for line in p.lines} == {"o + router": 14, "MoE": 40}
    assert p.lines[0].of_ceiling == pytest.approx(11 / 14)


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
    found = decide(profile_of(shares, idle), ())
    assert {v.rule for v in found if v.applies} == applying
    assert all(v.sentence.endswith(".") for v in found)


def test_a_kernel_nobody_asked_for_is_named() -> None:
    rule = "another kernel than the one asked for"
    verdicts = {
        v.rule: v for v in decide(profile_of({"MoE": 1}), differences=["cuda.grouped_moe launched another build"])
    }
    assert verdicts[rule].applies
    assert "cuda.grouped_moe launched another build" in verdicts[rule].sentence
    assert not {v.rule: v for v in decide(profile_of({"MoE": 1}), ())}[rule].applies


def test_one_kernel_for_a_whole_step_is_not_divided() -> None:
    """Nobody measured its parts, so that none of them takes 0 %."""
    p = profile_of({"MoE": 1})
    whole = replace(p.lines[0], operations=("attention", "moe", "lm_head"))
    sentences = [v.sentence for v in decide(replace(p, lines=[whole]), ())]
    assert len(sentences) == 2
    assert "what its parts take was not measured" in sentences[0]
    assert not any("%" in s for s in sentences)


def test_the_next_bottleneck_is_the_time_above_the_floor() -> None:
    """lm_head is slower against its ceiling, but MoE loses more."""
    work = NONE | {"moe": Work(bytes=450e6), "lm_head": Work(bytes=4.5e6)}
    p = summarise("x", 1, spans(("MoE", 0, 200), ("lm_head", 200, 210)), 1, 210.0, work, H200, "")
    last = decide(p, ())[-1]
    assert last.rule == "next"
    assert "MoE" in last.sentence
    assert "100 us above" in last.sentence


def test_kernels_are_matched_by_name_and_order() -> None:
    order = [("gemm", ROWS["qkv"]), ("pack", ROWS["packing"]), ("gemm", ROWS["o"])]
    names = ["gemm", "pack", "gemm", "torch_copy"] * 2
    matched = match(order, [Interval(n, i, i + 1) for i, n in enumerate(names)], 2)
    assert [s.row.label for s in matched] == ["qkv", "packing", "o", "other"] * 2
    # one gemm too many: nobody can say whose it is
    odd = match(order, [Interval(n, i, i + 1) for i, n in enumerate([*names, "gemm"])], 2)
    assert {s.row.label for s in odd if s.name == "gemm"} == {"other"}
    assert {s.row.label for s in odd if s.name == "pack"} == {"packing"}


def test_every_launch_says_what_it_is_for() -> None:
    model = load.load_model(load.resolve_model("random:small"), REFERENCE, page_size=16)
    cache = timeline.fill(model, 1, 64)
    step = timeline.decode_step(model, cache, 20, 1)
    order = timeline.launch_order(lambda: model.forward(step))
    assert len(order) == len(model.plan.bound["decode"])
    assert order[0] == ("torch: reference.embed", ProfileRow("other", ("embed",)))
    assert ("torch: reference.moe", ProfileRow("moe", ("moe",))) in order


@pytest.mark.usefixtures("fast_machine")
def test_the_embedded_model_on_a_cpu() -> None:
    model = load.load_model(load.resolve_model(None), REFERENCE)
    decode = timeline.decode_profile(model, 2, 70, 2)
    assert {line.label for line in decode.lines} == {
        "embed", "qkv", "rope/KV", "attention", "o", "router", "MoE", "lm_head", "sampling"
    }  # fmt: skip
    assert decode.launches == len(model.plan.bound["decode"]) + 1
    assert sum(line.of_step for line in decode.lines) == pytest.approx(1, abs=0.05)
    assert any("distinct experts" in note for note in decode.notes)
    prompt = timeline.prefill_profile(model, 70, runs=1)
    assert prompt.rows == 70
    assert list(prompt.phases) == ["prefill"]


@pytest.mark.usefixtures("fast_machine")
def test_a_step_in_one_piece_is_one_line() -> None:
    model = load.load_model(load.resolve_model(None))
    decode = timeline.decode_profile(model, 2, 70, 2)
    assert decode.launches == 2
    (step,) = [line for line in decode.lines if line.label != "sampling"]
    assert "MoE" in step.label
    assert any("distinct experts" in note for note in decode.notes)
