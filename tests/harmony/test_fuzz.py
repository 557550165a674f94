"""Whatever tokens arrive: no exception, no token lost, no text invented, chunks do not matter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harmony_fuzz import check, mutated, parse, run, valid_streams

from halfbyte.harmony.parse import Parser, ParserTrace
from halfbyte.model.tokenizer import Tokenizer

SHORT, LONG = 20_000, 1_000_000
DOC = Path(__file__).parents[2] / "docs" / "harmony.md"


@pytest.mark.parametrize("block", range(8))
def test_mutated_streams(block: int) -> None:
    size = SHORT // 8
    seen = run(block * size, size)
    assert len(seen) > 20, "the mutations should reach most repairs"
    documented = set(re.findall(r"^\| `(\w+)` \|", DOC.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(seen) <= documented


@pytest.mark.slow
def test_a_million_mutated_streams() -> None:
    """Seeds the short test has not seen, split over processes; a failing one prints its seed and stream."""
    workers = os.cpu_count() or 1
    share = LONG // workers + 1
    script = Path(__file__).with_name("harmony_fuzz.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(SHORT + n * share), str(share)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for n in range(workers)
    ]
    seen: Counter[str] = Counter()
    outcomes = [(process.communicate(), process.returncode) for process in running]
    for (out, err), code in outcomes:
        assert code == 0, err[-2000:]
        seen.update(json.loads(out))
    assert len(seen) >= 30


def test_every_way_to_cut_a_stream() -> None:
    for stream in valid_streams()[:25]:
        for end in range(len(stream) + 1):
            check(stream[:end])


def test_every_control_token_at_every_place() -> None:
    tokenizer = Tokenizer.gpt_oss()
    stream = tokenizer.encode(
        "<|channel|>analysis<|message|>a b<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>"
        "json<|message|>{}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>c<|end|>",
        allow_special=True,
    )
    for name in ("start", "end", "message", "channel", "constrain", "return", "call", "endoftext", "reserved_200017"):
        for at in range(len(stream) + 1):
            check([*stream[:at], tokenizer.special[f"<|{name}|>"], *stream[at:]])


def test_the_account_notices_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: parsers that lose a token, a byte or a word do not pass."""
    stream = next(s for s in map(mutated, range(100)) if len(parse(s)[0].messages) > 2)
    check(stream)

    def deaf(self: Parser, data: bytes, write: object = Parser._write) -> None:
        write(self, data[:-1])  # type: ignore[operator]

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "_write", deaf)
        with pytest.raises(AssertionError):
            check(stream)

    def silent(self: Parser, text: str, report: object = Parser._report) -> None:
        report(self, text.upper())  # type: ignore[operator]

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "_report", silent)
        with pytest.raises(AssertionError):
            check(stream)

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "_stray", lambda self, words: None)
        with pytest.raises(AssertionError):
            check(Tokenizer.gpt_oss().encode("<|channel|>final Sure thing<|message|>Yes<|return|>", allow_special=True))

    def forgetful(self: Parser, token: int) -> None:
        if self._trace is not None:
            self._trace.append(ParserTrace("header", self._bytes(token)))

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "_text", forgetful)
        with pytest.raises(AssertionError):
            check(stream)
