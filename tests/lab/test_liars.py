"""Servers that look faster or better than they are: each is found, with the reason, and the honest one is not.

The servers of the figures have a time of their own (`measure/virtual_server.py`), so that no machine decides.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.errors import AskError, UsageError
from halfbyte.gates import parse
from halfbyte.lab import check
from halfbyte.lab.check import alone
from halfbyte.lab.levels.correctness import REFERENCES, incoherence
from halfbyte.lab.levels.kernel_path import PathEvidence, judge, read_log
from halfbyte.lab.levels.protocol import Outcome, ProtocolReport, run_levels
from halfbyte.lab.levels.regression import compare_stored
from halfbyte.lab.levels.scores import Table, find_table, kept_positions, table_checks
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.engine_timing import TimedWork, measure_client
from halfbyte.lab.measure.event_stream import StreamReading
from halfbyte.lab.options import CheckOptions, Works
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import DISTURBED, Cell, Check, Result, ResultFile
from halfbyte.model import load
from tests.lab.measure.virtual_server import KnownServer

CELL = Cell("", "tiny", path="http")
DECODE, PROMPT = TimedWork(tokens=32), TimedWork(prompt=64)


class KnownClient:
    """A client of a server in virtual time, with the embedded model's tokenizer."""

    def __init__(self, server: KnownServer) -> None:
        self.server, self.client = server, server.client(load.tokenizer_of(load.resolve_model(None)))

    def complete(self, prompts: Sequence[list[int]], tokens: int) -> list[StreamReading]:
        answers: list[StreamReading] = self.server.run(self.client.complete_all(prompts, tokens))
        return answers


@pytest.fixture
def servers() -> Iterator[list[KnownServer]]:
    opened: list[KnownServer] = []
    yield opened
    for server in opened:
        server.close()


def figures_of(
    servers: list[KnownServer], server: KnownServer, *works: TimedWork, seed: int | None = None
) -> list[Result]:
    servers.append(server)
    return measure_client(KnownClient(server), works, 2, CELL, 1000, lambda _: None, seed=seed)


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [True, False])
def test_an_honest_server_has_its_figures(servers: list[KnownServer], ids: bool) -> None:
    decode, prompt = figures_of(servers, KnownServer(0.05, 0.005, ids=ids), DECODE, PROMPT)
    assert decode.figure("speed").value == pytest.approx(200.0)
    assert decode.figure("ttft").value == pytest.approx(50.0)
    assert decode.figure("e2e").value == pytest.approx(50.0 + 31 * 5.0)
    assert decode.detail["counted_by"] == ("ids" if ids else "spread, compared with the text")
    assert prompt.figure("speed").value == pytest.approx(64 / 0.05)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (KnownServer(0.01, 0.005, holds=True), "held back"),
        (KnownServer(0.01, 0.005, holds=True, ids=False, running=True), "held back"),
        (KnownServer(3.0, 0.00005), "behind a prompt of one token"),
        (KnownServer(0.01, 0.005, gathers=8), "held back"),
        (KnownServer(0.01, 0.005, gathers=8, ids=False, running=True), "held back"),
        (KnownServer(0.01, 0.005, waits=0.04), "computed before the first was sent"),
        (KnownServer(0.01, 0.005, waits=0.14), "computed before the first was sent"),
        (KnownServer(0.01, 0.005, waits=0.14, ids=False, running=True), "computed before the first was sent"),
        (KnownServer(0.01, 0.005, ids=False, spells=0.34), "claims 64 tokens in 2 answers, and their texts are 2[0-2]"),
        (KnownServer(0.01, 0.005, ids=False, running=True, spells=0.34), "in 2 answers, and their texts are 2[0-2]"),
    ],
    ids=[
        "burst",
        "burst by usage",
        "computes before the first",
        "a quarter is held back",
        "a quarter is held back by usage",
        "waits a little",
        "waits",
        "waits by usage",
        "a third",
        "a third by usage",
    ],
)
def test_a_decode_speed_that_contradicts_itself_is_invalid(
    servers: list[KnownServer], server: KnownServer, says: str
) -> None:
    (result,) = figures_of(servers, server, DECODE)
    assert result.invalid
    assert re.search(says, result.refused), result.refused


def test_an_honest_server_that_did_not_run_is_not_called_a_liar(servers: list[KnownServer]) -> None:
    """vLLM on two busy cores: an answer of 32 tokens came whole after 60 ms, one of 512 as it was computed."""
    (result,) = figures_of(servers, KnownServer(0.01, 0.002, stalls=0.1), DECODE)
    assert result.invalid
    assert result.detail[DISTURBED]
    assert "too busy for so short ones" in result.refused
    (liar,) = figures_of(servers, KnownServer(0.01, 0.002, holds=True), DECODE)
    assert DISTURBED not in liar.detail
    assert "held back" in liar.refused


def test_an_honest_server_may_be_slow_to_begin(servers: list[KnownServer]) -> None:
    """Its first token takes as long as all others, and a longer answer shows that these are as fast as they look."""
    (result,) = figures_of(servers, KnownServer(0.25, 0.005), DECODE)
    assert result.figure("speed").value == pytest.approx(200.0)


@pytest.mark.parametrize("running", [False, True])
def test_an_event_without_text_is_no_first_token(servers: list[KnownServer], running: bool) -> None:
    """It would make a prompt of 64 tokens that takes 50 ms look as if it took none."""
    (result,) = figures_of(servers, KnownServer(0.05, 0.005, ids=False, running=running, greets=True), PROMPT)
    assert result.figure("speed").value == pytest.approx(64 / 0.05)
    assert result.figure("ttft").value == pytest.approx(50.0)


def test_usage_that_the_last_event_inflates_is_invalid(servers: list[KnownServer]) -> None:
    """With ids it contradicts them; without ids the texts of all runs are too short for it."""
    (with_ids,) = figures_of(servers, KnownServer(0.01, 0.005, claims=1.4), DECODE)
    assert with_ids.invalid
    assert "counts 44 tokens and sent 32" in with_ids.refused
    inflated = KnownServer(0.01, 0.005, ids=False, short_by=8, claims=1.35)  # 24 tokens are sent, and 32 claimed
    (by_text,) = figures_of(servers, inflated, DECODE)
    assert by_text.invalid
    assert "their texts are" in by_text.refused


@pytest.mark.parametrize("work", [TimedWork(prompt=64), TimedWork(tokens=8, depth=64)], ids=["prompt", "depth"])
def test_a_prompt_that_was_cut_is_another_prompt(servers: list[KnownServer], work: TimedWork) -> None:
    (result,) = figures_of(servers, KnownServer(0.05, 0.005, reads=32), work)
    assert result.invalid
    assert "read 32 of a prompt's 64 tokens" in result.refused


@pytest.mark.parametrize("together", [4, 16])
def test_tokens_that_come_several_at_a_time_are_counted(servers: list[KnownServer], together: int) -> None:
    (result,) = figures_of(servers, KnownServer(0.05, 0.005, together=together), DECODE)
    assert result.figure("speed").value == pytest.approx(200.0)


def test_ids_without_their_text_are_no_tokens(servers: list[KnownServer]) -> None:
    (result,) = figures_of(servers, KnownServer(0.01, 0.005, spells=0.1), TimedWork(tokens=64))
    assert result.invalid
    assert "token ids spell" in result.refused


def test_every_invocation_has_prompts_of_its_own(servers: list[KnownServer]) -> None:
    """The server keeps what it has seen: a repeated seed finds its prompts in the cache, a new one does not."""
    server = KnownServer(0.05, 0.005)
    (first,) = figures_of(servers, server, PROMPT)
    (second,) = figures_of([], server, PROMPT)
    assert first.figures
    assert second.figures
    assert first.detail["seed"] != second.detail["seed"]
    (repeated,) = figures_of([], server, PROMPT, seed=first.detail["seed"])
    assert repeated.invalid
    assert "in the server's cache" in repeated.refused


def test_an_answer_that_ends_early_is_no_answer(servers: list[KnownServer]) -> None:
    (result,) = figures_of(servers, KnownServer(0.01, 0.005, short_by=1), DECODE)
    assert result.invalid
    assert "31 tokens instead of 32" in result.refused


def test_tokens_that_nothing_verifies_are_marked(servers: list[KnownServer]) -> None:
    server = KnownServer(0.05, 0.005, ids=False)
    servers.append(server)
    client = KnownClient(server)
    client.client.tokenizer = None
    (result,) = measure_client(client, [DECODE], 2, CELL, 1000, lambda _: None)
    assert result.detail["counted_by"] == "spread, unverified"


# ---- verdicts --------------------------------------------------------------------------------------------------------


def stored(results: Sequence[Result]) -> ResultFile:
    return ResultFile("halfbyte check", (), {"time": "2026-11-15T00:00:00"}, {}, tuple(results))


@pytest.mark.parametrize(("slower", "change"), [(1.25, "regression"), (1.0, "no difference")])
def test_default_repeats_tell_a_slower_engine(servers: list[KnownServer], slower: float, change: str) -> None:
    repeats = Works().repeats
    runs = []
    for factor in (1.0, slower):
        server = KnownServer(0.05 * factor, 0.005 * factor)
        servers.append(server)
        runs.append(measure_client(KnownClient(server), [DECODE, PROMPT], repeats, CELL, 1000, lambda _: None))
    compared = compare_stored(runs[1], stored(runs[0]))
    assert [r.detail["change"] for r in compared] == [change] * 2


def test_a_model_without_a_reference_is_not_judged(tmp_path: Path) -> None:
    subject = Subject(ScriptedPeer(), Setup("random:20b"), tmp_path)
    assert find_table(subject, REFERENCES) is None
    assert find_table(Subject(ScriptedPeer(), Setup(None), tmp_path), REFERENCES) is not None


@pytest.mark.parametrize(
    ("tokens", "logprob", "says"),
    [(range(64), -0.5, ""), ([1, 2, 3] * 21, -0.1, "repeats itself"), (range(64), -7.0, "is a guess")],
    ids=["text", "loop", "random"],
)
def test_without_a_reference_nonsense_is_found(tokens: Sequence[int], logprob: float, says: str) -> None:
    reply = Reply("text", "length", 4, 64, tuple(tokens), logprobs=(logprob,) * len(tokens))
    problem = incoherence(reply)
    assert says in problem
    assert bool(problem) == bool(says)


def test_an_old_log_in_a_reused_folder_is_not_believed(tmp_path: Path) -> None:
    cutlass = parse({"moe_kernel": "cutlass"}, env={})
    subject = Subject(ScriptedPeer(moe="unnamed"), Setup(None, cutlass), tmp_path, limits=LIMITS)
    folder = tmp_path / "001-kernel-path"
    folder.mkdir()
    (folder / "server.log").write_text("Using cutlass backend for the MoE\n")
    (outcome,) = run_levels(subject, ["1.5"], CheckOptions()).outcomes
    assert outcome.verdict == "NOT PROVEN"
    assert "nothing shows cutlass" in outcome.sentence


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with alone(folder, resume=False):
        with pytest.raises(UsageError, match="another run writes"), alone(folder, resume=False):
            pass
        (folder / "results.json").write_text("{}")
    with pytest.raises(UsageError, match="earlier run"), alone(folder, resume=False):
        pass
    with alone(folder, resume=True):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), alone(tmp_path / "file" / "run", resume=False):
        pass


def test_a_level_that_ended_is_on_disk_when_the_next_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = Result(Cell("smoke", "tiny"), checks=(Check("it answers", True),))

    def levels(subject: Subject, numbers: object, options: object, done: Any) -> None:
        done(Outcome("1", [good]))
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_levels", levels)
    with pytest.raises(KeyboardInterrupt):
        check.run_check(["1", "2"], CheckOptions(out=tmp_path / "run"), lambda _: None, lambda _: None)
    written = json.loads((tmp_path / "run" / "levels.json").read_text())
    assert [level["verdict"] for level in written["levels"]] == ["PASS"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(check, "run_levels", lambda subject, *_: ProtocolReport(subject))
    monkeypatch.setattr(check, "write_files", full)
    with pytest.raises(UsageError, match="No space left"):
        check.run_check(["1"], CheckOptions(out=tmp_path / "run"), lambda _: None, lambda _: None)


def test_a_disk_without_room_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_bytes", lambda _: 20 << 20)
    with (
        pytest.raises(UsageError, match="20480 KiB left, and a run needs 32 MiB"),
        alone(tmp_path / "run", resume=False),
    ):
        pass


def test_a_level_that_fails_on_a_full_disk_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is an engine blamed for a log that it could not write."""
    room = iter([1 << 30])  # at the start; later there is none
    good, bad = (Result(Cell("smoke", "tiny"), checks=(Check("it answers", ok),)) for ok in (True, False))
    shown: list[str] = []

    def levels(subject: Subject, numbers: object, options: object, done: Any) -> None:
        done(Outcome("1", [good]))
        done(Outcome("3", [bad]))

    monkeypatch.setattr(check, "run_levels", levels)
    monkeypatch.setattr(check, "free_bytes", lambda _: next(room, 0))
    with pytest.raises(UsageError, match="No space left on device, so that level 3 was not judged"):
        check.run_check(["1", "3"], CheckOptions(out=tmp_path / "run"), lambda _: None, lambda o: shown.append(o.level))
    assert shown == ["1"]
    written = json.loads((tmp_path / "run" / "levels.json").read_text())
    assert [level["level"] for level in written["levels"]] == ["1"]


@pytest.mark.parametrize(
    "line",
    [
        "WARNING mxfp4.py:88] CUTLASS is not available here, falling back to Marlin.",
        "Your GPU does not have native support for FP4 computation. Weight-only FP4 compression will be used "
        "leveraging the Marlin kernel.",
        "flashinfer: no kernel for this shape, fallback to triton moe",
        "Switching to triton_kernels for the experts",
    ],
)
def test_a_fallback_is_known_as_one(tmp_path: Path, line: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"Using cutlass backend for the MoE\n{line}\n")
    evidence = PathEvidence(statements=read_log(log))
    (verdict,) = judge(parse({"moe_kernel": "cutlass"}, env={}), evidence)
    assert not verdict.ok
    log.write_text("Using cutlass backend for the MoE\nattention: FA3 is missing, falling back to triton\n")
    (verdict,) = judge(parse({"moe_kernel": "cutlass"}, env={}), PathEvidence(statements=read_log(log)))
    assert verdict.ok, verdict.note


def test_what_was_passed_over_did_not_run(tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU says only this of an attention that was asked for, and takes its own."""
    log = tmp_path / "server.log"
    log.write_text("INFO [cpu.py:178] Cannot use AttentionBackendEnum.TRITON_ATTN backend on CPU.\n")
    (verdict,) = judge(parse({"attention": "triton"}, env={}), PathEvidence(statements=read_log(log)))
    assert not verdict.ok
    assert verdict.note.startswith("must not be seen")
    (verdict,) = judge(parse({"attention": "flashinfer"}, env={}), PathEvidence(statements=read_log(log)))
    assert verdict.note == "nothing shows flashinfer"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING 11-19 18:41:04 [vllm.py:1727] Inductor compilation was disabled by user settings, optimizations "
        "settings that are only active during inductor compilation will be ignored.",
        "INFO [arg_utils.py:3183] Defaulting max_num_seqs to 256 for OPENAI_API_SERVER usage context.",
        "WARNING [caching.py:544] No execution code found, falling back to graph module execution.",
        "WARNING [tensor_ipc.py:101] Failed to send tensor via IPC queue: closed. Falling back to standard "
        "serialization.",
        "WARNING [vllm.py:725] Model Runner V2 requires Triton; using the V1 model runner instead.",
    ],
)
def test_what_else_falls_back_says_nothing_about_experts(tmp_path: Path, line: str) -> None:
    """Lines that vLLM 0.32 writes, some of them whenever it runs without graphs."""
    log = tmp_path / "server.log"
    log.write_text(f"INFO [mxfp4.py:88] Using 'MARLIN' Mxfp4 MoE backend.\n{line}\n")
    verdicts = judge(parse({"moe_kernel": "marlin", "graphs": "off"}, env={}), PathEvidence(statements=read_log(log)))
    assert all(v.ok for v in verdicts), [v.note for v in verdicts]


def test_a_long_prompt_that_is_not_scored_was_not_judged(tmp_path: Path) -> None:
    """An engine with a short context is no PASS, and no FAIL; a short prompt that it does not score is its fault."""

    class Short(Asker):
        def __init__(self, context: int) -> None:
            self.context = context

        def ask(self, question: Question) -> Reply:
            if len(question.prompt) > self.context:
                raise AskError(f"HTTP 400: the context has {self.context} tokens")
            return Reply("", "length", len(question.prompt), 1, None, logprobs=(0.0,) * (len(question.prompt) + 1))

    subject, gaps = Subject(ScriptedPeer(), Setup(None, device="cpu"), tmp_path), list[str]()
    prompts = [(7,) * n for n in (2000, 6000)]
    table = Table("tiny", tuple(prompts), tuple((0.0,) * len(kept_positions(len(p))) for p in prompts))
    long, _ = table_checks(subject, Short(5000), table, {}, gaps)
    assert long.ok
    reason = "HTTP 400: the context has 5000 tokens"
    assert gaps == [f"This engine did not score a prompt of 6000 tokens, which was not judged ({reason})."]
    with pytest.raises(AskError):
        table_checks(subject, Short(1000), table, {}, [])
