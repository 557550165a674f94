"""Answers on a terminal: a spinner while the model thinks, markdown as it arrives. Elsewhere: the plain text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from halfbyte.cli.conversation import AnswerText

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

CODE_THEME = "ansi_dark"  # the terminal's own colours, on its own background
REFRESH = 12  # times a second


def show(pieces: Iterator[AnswerText], console: Console, *, reasoning: bool = False) -> Iterator[str]:
    """Print an answer while it arrives; yields each piece of what was said, so that an interrupted one is known."""
    if not console.is_terminal:
        for piece in pieces:
            if piece.kind == "content":
                console.print(piece.text, end="", markup=False, emoji=False)
                yield piece.text
        console.print()
        return
    console = Console(file=console.file, highlight=False)  # one that breaks lines between words
    with Thought(console, aloud=reasoning) as thought:
        first = next((p for p in pieces if thought.hears(p)), None)
    if first is None:
        return
    with StreamedMarkdown(console) as answer:
        answer.add(first.text)
        yield first.text
        for piece in pieces:
            if piece.kind == "content":
                answer.add(piece.text)
                yield piece.text


class Thought:
    """A spinner with the last words of the reasoning; the whole of it, dim, if it is asked for."""

    def __init__(self, console: Console, *, aloud: bool) -> None:
        self.console = console
        self.aloud = aloud
        self.text = ""
        self.start = time.monotonic()
        self.spinner = Spinner("dots", Text("waiting", style="dim"), style="dim")
        self.live = Live(self.spinner, console=console, transient=True, refresh_per_second=REFRESH)

    def __enter__(self) -> Thought:
        self.live.start()
        return self

    def hears(self, piece: AnswerText) -> bool:
        """Whether the answer begins here."""
        if piece.kind == "content":
            return True
        if self.aloud:
            self.live.stop()
            self.console.print(piece.text, end="", style="dim", markup=False, emoji=False)
        self.text += piece.text
        tail = " ".join(self.text[-400:].split())
        room = max(10, self.console.width - 14)
        self.spinner.update(text=Text(f"thinking  {tail[-room:]}", style="dim", no_wrap=True, overflow="crop"))
        return False

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        if not self.text:
            return
        if self.aloud:
            self.console.print("\n")
        else:
            self.console.print(f"[dim]thought for {time.monotonic() - self.start:.1f} s[/dim]")


class StreamedMarkdown:
    """Markdown whose end is not known yet: blocks that are whole are printed for good, and only the last one is drawn
    again with every piece."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.text = ""
        self.printed = 0  # characters
        self.live = Live("", console=console, transient=True, refresh_per_second=REFRESH)

    def __enter__(self) -> StreamedMarkdown:
        self.live.start()
        return self

    def add(self, piece: str) -> None:
        self.text += piece
        block = last_block(self.text[self.printed :])
        if block:
            self._print(self.text[self.printed : self.printed + block])
            self.printed += block
        self.live.update(Blocks(self.text[self.printed :], only_end=True))

    def __exit__(self, *_: object) -> None:
        self.live.update("")
        self.live.stop()
        self._print(self.text[self.printed :])

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self.printed:
            self.console.print()
        self.console.print(Blocks(text), end="")


class Blocks:
    """Markdown without the empty lines around it, or as much of its end as the window has room for."""

    def __init__(self, text: str, *, only_end: bool = False) -> None:
        self.text = text
        self.only_end = only_end

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self.text, code_theme=CODE_THEME), options, pad=False)
        filled = [n for n, line in enumerate(lines) if any(s.text.strip() for s in line)]
        lines = lines[filled[0] : filled[-1] + 1] if filled else []
        for line in lines[-max(1, console.height - 3) :] if self.only_end else lines:
            yield from line
            yield Segment.line()


def last_block(text: str) -> int:
    """Where the last top-level block of a text begins; nothing before it can change any more."""
    from markdown_it import MarkdownIt

    starts = [t.map[0] for t in MarkdownIt().enable("table").parse(text) if t.level == 0 and t.map]
    if len(starts) < 2 or starts[-1] == 0:
        return 0
    return sum(len(line) for line in text.splitlines(keepends=True)[: starts[-1]])
