"""`chat` as a person has it: in a pseudo terminal, keys in, screen out; and without a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halfbyte import gates

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "scripted_chat.py"
PATIENCE = 120  # a busy machine must not decide a test
ROWS, COLUMNS = 200, 100  # so tall that nothing scrolls away
HALFBYTE = ["-c", "from halfbyte.cli import main; main()"]


def like_a_persons_terminal() -> None:
    """In the child, before the program. Tests that run in the background inherit signals that are ignored; and what an
    interrupt finds on its way to the screen is thrown away by default, halves of escape sequences among it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    modes = termios.tcgetattr(0)
    modes[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, modes)


class Terminal:
    """A program on a screen that a test can read. Every wait ends, and what fails shows the screen."""

    def __init__(self, arguments: list[str], home: Path, *, columns: int = COLUMNS, ready: bool = True, **more: str):
        environment = {
            **os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "HALFBYTE_CACHE_DIR": str(home),
            **more,
        }  # fmt: skip
        self.screen = pyte.Screen(columns, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.ended = False
        self.child = pexpect.spawn(
            sys.executable, arguments, env=environment, cwd=str(ROOT), dimensions=(ROWS, columns), timeout=PATIENCE,
            preexec_fn=like_a_persons_terminal,
        )  # fmt: skip
        if ready:
            self.wait_until(self.is_asking)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    @property
    def unwrapped(self) -> str:
        """Lines that fill the screen joined with what follows: where a narrow one breaks depends on how words come."""
        lines = self.screen.display
        return "".join(line if line[-1] != " " else line.rstrip() + "\n" for line in lines).rstrip()

    def is_asking(self) -> bool:
        """The cursor stands behind an empty prompt."""
        return self.screen.cursor.x == 2 and bool(self.screen.display[self.screen.cursor.y].rstrip() == ">")

    def read(self) -> None:
        """Everything that is there; if nothing is, what comes within a moment."""
        try:
            self.stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.2))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF:
            self.ended = True

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert not self.ended, f"the program has ended; the screen:\n{self.text}"
            assert time.monotonic() < deadline, f"it did not happen; the screen:\n{self.text}"
            self.read()

    def send(self, keys: str) -> None:
        self.child.send(keys)

    def ask(self, keys: str, answer: str) -> None:
        """Type a line and wait for its answer, which may have stood there before, and for the next question."""
        before = self.unwrapped.count(answer) + keys.count(answer)
        self.send(f"{keys}\r")
        self.wait_until(lambda: self.unwrapped.count(answer) > before and self.is_asking())

    def stop_an_answer(self, line: str, once_shown: str) -> None:
        """The interrupt goes out when the new answer is on the screen, never while the line editor still reads: what
        is typed ahead of an answer waits for the next question."""
        before = self.text.count(once_shown)
        self.send(f"{line}\r")
        self.wait_until(lambda: self.text.count(once_shown) > before)
        stopped = self.text.count("(stopped)")
        self.send("\x03")
        self.wait_until(lambda: self.text.count("(stopped)") > stopped and self.is_asking())

    def wait_for_end(self, status: int = 0) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.ended:
            assert time.monotonic() < deadline, f"the program did not end; the screen:\n{self.text}"
            self.read()
        self.child.close()
        assert self.child.exitstatus == status, self.text

    def end(self) -> None:
        self.send("\x04")
        self.wait_for_end()


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*more: str, **options: Any) -> Terminal:
        opened.append(Terminal([str(SCRIPT), *more], tmp_path, **options))
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
    t.ask("gone", "does not answer (ConnectError). /again asks once more.")
    t.ask("/again", "does not answer (ConnectError). /again asks once more.")
    t.ask("/undo", "taken back: first")  # what was not answered is no part of the conversation
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
        t.stop_an_answer(line, "word30 ")
    t.ask("/reasoning", "reasoning is shown")
    t.ask("more", "I was asked 'more'.")
    assert "[more]" in t.text
    t.end()


def test_a_narrow_terminal_without_colours(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "go").touch()
    t = chat(columns=24, NO_COLOR="1")
    t.ask("markdown", "x = 1")
    assert "128" in t.text
    assert "tokens." in t.text
    colours = {cell.fg for row in t.screen.buffer.values() for cell in row.values()}
    assert colours <= {"default"}
    for _ in range(3):  # as an impatient person does
        t.send("\x03")
    t.ask("after", "[after]")
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
    for line, status, said in (("gone", 1, "does not answer"), ("/fly", 2, "there is no /fly")):
        done = subprocess.run(
            [sys.executable, str(SCRIPT)], input=f"{line}\nnever asked\n", capture_output=True, text=True,
            timeout=PATIENCE, env=environment, cwd=ROOT,
        )  # fmt: skip
        assert (done.returncode, "never" in done.stdout) == (status, False)
        assert said in done.stderr.splitlines()[-1]


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
