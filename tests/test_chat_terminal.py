"""`chat` as a person has it: in a pseudo terminal, keys in, screen out; and without a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from halfbyte import gates

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "scripted_chat.py"
PATIENCE = 120  # a busy machine must not decide a test
ROWS, COLUMNS = 300, 100  # so tall that nothing scrolls away
HALFBYTE = ["-c", "from halfbyte.cli import main; main()"]


class Terminal:
    """A program on a screen that a test can read."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        environment = {
            **os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "HALFBYTE_CACHE_DIR": str(home),
        }  # fmt: skip
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.child = pexpect.spawn(
            sys.executable, arguments, env=environment, cwd=str(ROOT), dimensions=(ROWS, COLUMNS), timeout=PATIENCE,
            # Tests that run in the background inherit an interrupt that is ignored; a person's terminal has none.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.wait_until(self.is_asking)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def is_asking(self) -> bool:
        return self.text.splitlines()[-1:] == [">"]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen; the screen:\n{self.text}"
            with suppress(pexpect.TIMEOUT):
                self.stream.feed(self.child.read_nonblocking(4096, timeout=0.2))

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def ask(self, keys: str, answer: str) -> None:
        """Type a line and wait for its answer, which may have stood there before, and for the next question."""
        before = self.text.count(answer) + keys.count(answer)
        self.send(f"{keys}\r")
        self.wait_until(lambda: self.text.count(answer) > before and self.is_asking())

    def end(self) -> None:
        self.send("\x04")
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*more: str) -> Terminal:
        opened.append(Terminal([str(SCRIPT), *more], tmp_path))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.child.close(force=True)


def test_a_conversation_with_its_keys_and_commands(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    t = chat()
    t.ask("hello", "[hello]")
    t.ask("second", "before=['hello']")
    t.ask("/effort high", "effort: high")
    t.ask("/effort huge", "there is no effort 'huge'; use low, medium or high")
    t.ask("/fly", "there is no /fly; /help lists")
    t.ask("/help", "Ctrl+D does")
    assert all(f"/{name}" in t.text for name in ("new", "again", "undo", "effort", "reasoning", "system", "save"))
    t.ask("/new", "a new conversation")
    t.ask("third", "before=[] effort=high [third]")
    t.ask("/undo", "taken back: third")
    t.ask("\x1b[A" * 8, "[second]")  # up, past the commands, to the question before them
    t.ask("abc\x1b[D\x1b[D\x1b[DX", "[Xabc]")  # typed, three to the left, typed
    t.ask("one\x1b\rtwo", "lines=2")  # Alt+Enter breaks the line
    t.ask("\x1b[200~first\nsecond\nthird\x1b[201~", "lines=3")  # a paste, in the brackets that terminals put around it
    t.ask(f"/save {tmp_path / 'talk.md'}", "saved")
    assert "first\nsecond\nthird" in (tmp_path / "talk.md").read_text(encoding="utf-8")
    t.ask("too much", "/new starts over")
    t.send("half a line")
    t.wait_until(lambda: "half a line" in t.text)
    t.send("\x03")  # Ctrl+C drops what was typed
    t.wait_until(t.is_asking)
    t.ask("whole", "[whole]")
    t.end()
    t = chat()  # the history outlives the session
    t.ask("\x1b[A", "[whole]")
    t.end()
    assert (tmp_path / "chat" / "history").stat().st_mode & 0o077 == 0


def test_an_answer_is_markdown_and_can_be_stopped(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    t = chat()
    t.send("markdown\r")
    t.wait_until(lambda: "thinking  I was asked 'markdown'." in t.text)  # a spinner with the last words of the thought
    (tmp_path / "chat" / "go").touch()
    t.wait_until(lambda: "x = 1" in t.text and t.is_asking())
    assert "thinking" not in t.text
    assert "thought for" in t.text
    assert "A layer sees 128 tokens." in t.text
    assert "**" not in t.text
    assert "|---|" not in t.text
    assert t.text.count("x = 1") == 1
    for line in ("long", "/again"):
        t.send(f"{line}\r")
        t.wait_until(lambda: "word30 " in t.text)
        t.send("\x03")
        before = t.text.count("(stopped)")
        t.wait_until(lambda b=before: t.text.count("(stopped)") > b and t.is_asking())  # type: ignore[misc]
    t.ask("/reasoning", "reasoning is shown")
    t.ask("more", "I was asked 'more'.")
    assert "[more]" in t.text
    t.end()


def test_lines_that_are_piped_in_are_questions(tmp_path: Path) -> None:
    environment = {**os.environ, "HALFBYTE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input="one\n\n/effort low\ntwo\n", capture_output=True, text=True,
        timeout=PATIENCE, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "lines=1 before=[] effort=medium [one]",
        "lines=1 before=['one'] effort=low [two]",
    ]


def test_blocks_that_are_whole_are_printed_once() -> None:
    from halfbyte.cli.screen import last_block

    assert last_block("one") == 0
    assert last_block("one\n\ntwo") == len("one\n\n")
    assert last_block("- a\n- b\n\nend") == len("- a\n- b\n\n")
    assert last_block("```\ncode\n\nmore") == 0
    assert last_block("|a|\n|-|\n|1|\n") == 0


@pytest.mark.slow
def test_the_embedded_model_in_a_terminal(tmp_path: Path) -> None:
    kept = gates.cache_folder("cpu")  # compiled kernels, without the list of servers that may run here
    if kept.is_dir():
        (tmp_path / "cpu").symlink_to(kept)
    t = Terminal([*HALFBYTE, "run", "tiny"], tmp_path)
    t.ask("What is 17 + 25?", "42")
    t.end()
    done = subprocess.run(
        [sys.executable, *HALFBYTE, "run", "tiny", "What is 17 + 25?"], capture_output=True, text=True,
        timeout=PATIENCE, stdin=subprocess.DEVNULL, env={**os.environ, "HALFBYTE_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "42" in done.stdout, done.stderr
