"""Each fault of a scripted engine is found by the level whose affair it is, with diagnostics; no process is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates, parse
from halfbyte.lab.levels.correctness import Reference, make_reference
from halfbyte.lab.levels.protocol import ProtocolReport, run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import CheckOptions, StressCounts
from halfbyte.lab.peers.launch import Setup

SMALL = StressCounts(
    sequential=8, together=(2, 4), prefill=40, generation=20, load=12, at_once=4, tokens=4, settle_s=0.1
)
CUTLASS = parse({"moe_kernel": "cutlass"}, env={})


def subject_of(peer: ScriptedPeer, folder: Path, gates: Gates | None = None, **limits: float) -> Subject:
    return Subject(peer, Setup(None, gates or Gates()), folder, limits=replace(LIMITS, **limits))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script says while nothing is wrong with it."""
    folder = tmp_path_factory.mktemp("reference")
    subject = subject_of(ScriptedPeer(), folder)
    with subject.process("reference") as engine:
        made = make_reference(subject, engine.asker, Suite("quick"))
    assert made.mean_length > 5
    made.write(folder / "scripted.json")
    assert Reference.read(folder / "scripted.json") == made
    return folder / "scripted.json"


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    left = [p for p in psutil.Process().children(recursive=True) if "scripted_engine" in " ".join(p.cmdline())]
    assert not left


def verdicts(report: ProtocolReport) -> dict[str, str]:
    return {o.level: o.verdict for o in report.outcomes}


def test_an_engine_without_a_fault_passes(tmp_path: Path, reference: Path) -> None:
    subject = subject_of(ScriptedPeer(), tmp_path, CUTLASS)
    report = run_levels(subject, ["1", "1.5", "2", "3"], CheckOptions(counts=SMALL, reference=reference))
    # It scores no prompts, so that its log probabilities are not measured, which is no PASS; every check holds.
    assert verdicts(report) == {"1": "PASS", "1.5": "PASS", "2": "NOT PROVEN", "3": "PASS"}, [
        o.reasons for o in report.outcomes
    ]
    assert all(c.ok for r in report.results for c in r.checks)
    assert not report.ok
    assert not subject.diagnostics
    smoke = report.outcomes[0].results
    assert [r.cell.shape["case"] for r in smoke] == ["with the feature", "baseline"]
    assert smoke[0].cell.gates == {"moe_kernel": "cutlass"}
    assert smoke[1].cell.gates == {}


# fault, how many requests are answered first, the level that must find it, its verdict, what it says
FOUND = (
    ("crash at start", 0, "1", "FAIL", "exit status 1 before it was ready"),
    ("slow start", 0, "1", "FAIL", "not healthy within"),
    ("ignores SIGTERM", 0, "1", "FAIL", "it ends when it is asked failed"),
    ("leaves children", 0, "1", "FAIL", "no process is left failed"),
    ("wrong kernel", 0, "1.5", "INVALID", "must not be seen: Using marlin"),
    ("rambles", 0, "2", "FAIL", "mean length"),
    ("truncates", 0, "2", "FAIL", "as many tokens as asked for"),
    ("nan logprobs", 0, "2", "FAIL", "no NaN or infinity"),
    ("no determinism", 0, "2", "FAIL", "the same seed gives the same tokens"),
    ("crash in request", 8, "3", "FAIL", "outside of its memory"),
    ("hang", 16, "3", "FAIL", "no answer within 3 s"),
    ("stops answering", 16, "3", "FAIL", "no answer within 3 s"),
    ("leaks memory", 0, "3", "FAIL", "memory growth failed"),
    ("zombies", 0, "3", "FAIL", "no zombies failed"),
    ("falls back", 0, "1.5", "INVALID", "falling back to Marlin"),
    ("ignores filters", 0, "2", "FAIL", "tokens lie outside of it"),
    ("logprobs times 1.5", 0, "2", "FAIL", "sampling by its distribution: temperature 1"),
    ("loses letters", 0, "2", "FAIL", "texts are their tokens"),
    ("mixed streams", 0, "3", "FAIL", "a stream began"),
    ("cut streams", 0, "3", "FAIL", "without its end"),
    ("streams lose letters", 0, "2", "FAIL", "streams are their answers"),
    ("streams lose letters", 8, "3", "FAIL", "came as"),
    ("one answer", 0, "2", "FAIL", "1 answers, 1 of them different"),
)


# What `peers/test_process.py` looks at as well, and further answers that are wrong, wait for the long run.
LONG = {"slow start", "ignores SIGTERM", "truncates", "no determinism", "stops answering", "zombies"}
CASES = [pytest.param(*f, id=f[0], marks=[pytest.mark.slow] if f[0] in LONG else []) for f in FOUND]


@pytest.mark.parametrize(("fault", "after", "level", "verdict", "says"), CASES)
def test_each_fault_is_found_by_its_level(
    tmp_path: Path, reference: Path, fault: str, after: int, level: str, verdict: str, says: str
) -> None:
    slow = {"start_s": 1.0} if fault == "slow start" else {}
    silent = {"request_s": 3.0} if fault in ("hang", "stops answering") else {}
    deaf = {"stop_s": 0.5} if fault == "ignores SIGTERM" else {}
    subject = subject_of(ScriptedPeer(fault, after=after), tmp_path, CUTLASS, **deaf, **slow, **silent)
    subject.baseline = CUTLASS
    counts = replace(SMALL, sequential=100) if fault == "cut streams" else SMALL  # 2 % of them
    report = run_levels(subject, [level], CheckOptions(counts=counts, reference=reference))
    (outcome,) = report.outcomes
    assert outcome.verdict == verdict
    assert not report.ok
    said = " ".join([*outcome.reasons, *(f"{c.what} {c.note}" for r in outcome.results for c in r.checks if not c.ok)])
    assert says in said
    assert subject.diagnostics
    for folder in subject.diagnostics:
        assert {"server_log.txt", "exit.json", "causes.md", "requests.jsonl"} <= {p.name for p in folder.iterdir()}
        if fault != "slow start":  # which may have said nothing yet
            assert "scripted engine" in (folder / "server_log.txt").read_text()


def test_an_engine_without_a_reference_is_never_passed(tmp_path: Path) -> None:
    """Random weights: whatever it answers, nothing shows that it is right."""
    subject = Subject(ScriptedPeer(), Setup("random:20b"), tmp_path, limits=LIMITS)
    (outcome,) = run_levels(subject, ["2"], CheckOptions()).outcomes
    assert outcome.verdict in ("NOT PROVEN", "FAIL")
    assert outcome.not_proven


def test_what_an_engine_refuses_is_blocked_and_no_failure_of_its(tmp_path: Path) -> None:
    subject = subject_of(ScriptedPeer(), tmp_path, parse({"tile": "64x128"}, env={}))
    report = run_levels(subject, ["1.5", "2"], CheckOptions(counts=SMALL))
    assert verdicts(report) == {"1.5": "REFUSED", "2": "REFUSED"}
    assert not report.ok
    assert not subject.diagnostics
