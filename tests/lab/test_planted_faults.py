"""Faults planted into a real `halfbyte serve`: its level finds each, and says what is wrong; the control passes.

These are the runs of `python -m bench run faults`; they take up to a minute each."""

from __future__ import annotations

import pytest

from bench.checks.faults import CONTROL, FAULTS, expected_verdict, outcomes_of

SAYS = {
    "the window is off by one": "log probabilities of long prompts",
    "the rope base is off by 1 %": "log probabilities of long prompts",
    "the rope base is off by 10 %": "log probabilities of long prompts",
    "three experts instead of four": "log probabilities of long prompts",
    "the limit of SwiGLU is 2": "log probabilities of long prompts",
    "the epsilon of the norms is 0.01": "log probabilities of long prompts",
    "the window is one page larger": "log probabilities of long prompts",
    "a page is given back early": "log probabilities|scored again",
    "prefix hashes are not chained": "scored again as prompts",
    "positions of the second chunk are off by one": "log probabilities of long prompts",
    "tokens are swapped among more than 8 streams": "16 at once answer as alone",
    "top_p is ignored": "sampling by its distribution: top_p",
    "top_k is ignored": "sampling by its distribution: top_k",
    "min_p is ignored": "sampling by its distribution: min_p",
    "the seed is ignored": "the same seed gives the same tokens",
    "the temperature is ignored": "other seeds give others",
    "log probabilities are multiplied by 1.5": "log probabilities|sampling",
    "texts lose letters": "texts are their tokens|greedy|sampling",
    "--kv-dtype is ignored": "kv_dtype fp8 ran",
    "--speculate is ignored": "speculate ngram ran",
    "sinks are left out": "log probabilities of long prompts",
    "the temperature of YaRN is left out": "log probabilities of long prompts",
    "a figure is misspelt": "texts are their tokens",
    "scores belong to the token before": "greedy takes the best|log probabilities of long prompts",
    "grammars are ignored": "an answer fits its schema|a required tool is called",
    "preempted requests change a token": "64 at once with preemptions",
    "penalties are ignored": "greedy with penalties",
    "bias is ignored": "logit_bias",
    "stop strings are ignored": "a stop string ends the answer",
    "n is ignored": "n of 3 gives as many answers",
    "the frequency penalty is ignored": "greedy with frequency_penalty",
    "every temperature is 1": "sampling by its distribution: temperature 0.5",
    "prompts are cut to 1024 tokens": "answers to long prompts scored again",
    "answers are kept by the beginning of a prompt": "answers to similar prompts scored again",
    "prompts count twice": "prompts have as many tokens as were sent",
    "every answer ends with stop": "an answer that is cut off says so",
    "streams lose a piece": "streams are their answers",
    "streamed tokens are made up": "the timed answer is not the engine's own|timed answers are not greedy",
    "streams are held back": "held back and sent in a burst",
}


def test_every_fault_has_its_reason() -> None:
    assert set(FAULTS) == {CONTROL, *SAYS}


@pytest.mark.slow
def test_the_control_passes() -> None:
    for outcome in outcomes_of(CONTROL):
        assert outcome.verdict == "PASS", (outcome.level, outcome.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_found(fault: str) -> None:
    (outcome,) = outcomes_of(fault)
    assert outcome.verdict == expected_verdict(fault)
    wrong = [c.what for r in outcome.results for c in r.checks if not c.ok] + outcome.reasons
    assert any(reason in what for reason in SAYS[fault].split("|") for what in wrong), (wrong, outcome.reasons)
