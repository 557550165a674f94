"""`chat`: talk to a model in the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from halfbyte import gates as gates_
from halfbyte.cli.conversation import (
    PREFIX_OPTIONS,
    Answers,
    EngineChoice,
    Exchange,
    Manner,
    Reasoning,
    check_effort,
    open_answers,
)
from halfbyte.cli.options import ModelArgument, check_number, err, out, print_table, with_gates, with_record
from halfbyte.engine.options import EngineOptions
from halfbyte.errors import ContextError, HalfbyteError, PeerDiedError, UsageError
from halfbyte.gates import Gates

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


@with_gates
@with_record("manner", Manner)
@with_record("choice", EngineChoice)
@with_record("options", EngineOptions, only=PREFIX_OPTIONS)
def chat(
    model: ModelArgument = None,
    reasoning: Reasoning = False,
    *,
    choice: EngineChoice,
    manner: Manner,
    options: EngineOptions,
    gates: Gates,
) -> None:
    """Talk to a model in the terminal; /help lists what can be done there."""
    with open_answers(model, choice, gates, options) as answers:
        Chat(answers, manner, reasoning).run()


class Chat:
    """One conversation: what was said, and how to go on."""

    def __init__(self, answers: Answers, manner: Manner, reasoning: bool = False) -> None:
        self.answers = answers
        self.manner = manner
        self.reasoning = reasoning
        self.exchanges: list[Exchange] = []
        self.unanswered: str | None = None  # the last question, where nothing was said to it
        self.ended = False

    def run(self) -> None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            for line in sys.stdin:  # what is piped in: each line is a question
                self.take(line.rstrip("\n"), alone=True)
                if self.ended:
                    return
            return
        read = prompt_reader()
        err.print(f"[dim]{self.answers.label} · Enter sends, Alt+Enter starts a new line, Ctrl+C stops an answer, "
                  "Ctrl+D quits · /help[/dim]")  # fmt: skip
        while not self.ended:
            try:
                self.take(read())
            except KeyboardInterrupt:
                continue  # what was typed is dropped; a second interrupt of one answer loses no conversation
            except EOFError:
                break

    def take(self, line: str, *, alone: bool = False) -> None:
        """A question or a command. A person reads what went wrong and goes on; `alone`, it ends the program."""
        if not line.strip():
            return
        word = line.split()[0]
        try:
            if word.startswith("/") and "/" not in word[1:]:
                self.command(word[1:], line.strip()[len(word) :].strip())
            else:
                self.ask(line)
        except HalfbyteError as e:
            if alone:
                raise
            hint = {ContextError: "/new starts over, /undo takes the last question back.",
                    PeerDiedError: "/again asks once more."}.get(type(e), "")  # fmt: skip
            err.print(f"{e} {hint}".rstrip(), style="red", markup=False)

    def ask(self, question: str) -> None:
        from halfbyte.cli.screen import show

        parts: list[str] = []
        self.unanswered = question
        try:
            for text in show(self.answers.pieces(self.exchanges, question, self.manner), out, reasoning=self.reasoning):
                parts.append(text)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            err.print("[dim](stopped)[/dim]")
        if parts:
            self.exchanges.append(Exchange(question, "".join(parts)))
            self.unanswered = None

    # ---- what a line with a slash does --------------------------------------------------------

    def command(self, name: str, rest: str) -> None:
        if name not in COMMANDS:
            raise UsageError(f"there is no /{name}; /help lists what there is.")
        COMMANDS[name][0](self, rest)

    def help(self, _: str) -> None:
        rows = [{"command": f"/{name}", "": text} for name, (_, text) in COMMANDS.items()]
        print_table(rows, left=2)

    def new(self, _: str) -> None:
        self.exchanges.clear()
        self.unanswered = None
        err.print("[dim]a new conversation[/dim]")

    def again(self, _: str) -> None:
        if self.unanswered is None and not self.exchanges:
            raise UsageError("there is no question to answer again yet.")
        self.ask(self.unanswered or self.exchanges.pop().question)

    def undo(self, _: str) -> None:
        if not self.exchanges:
            raise UsageError("there is no question to take back yet.")
        self.unanswered = None
        err.print(f"[dim]taken back:[/dim] {self.exchanges.pop().question}", markup=True)

    def set_effort(self, text: str) -> None:
        if text:
            self.manner.effort = check_effort(text)
        err.print(f"[dim]effort: {self.manner.effort}[/dim]")

    def set_system(self, text: str) -> None:
        self.manner.system = text or None
        err.print("[dim]instructions: [/dim]", end="")
        err.print(text or "none", markup=False)

    def set_temperature(self, text: str) -> None:
        if text:
            try:
                value = check_number(float(text), "the temperature")
            except ValueError:
                raise UsageError(f"{text!r} is no temperature; give a number from 0 on.") from None
            if value < 0:
                raise UsageError(f"{text!r} is no temperature; give a number from 0 on.")
            self.manner.temperature = value
        err.print(f"[dim]temperature: {self.manner.temperature:g}[/dim]")

    def show_reasoning(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise UsageError("/reasoning takes on or off.")
        self.reasoning = not self.reasoning if not text else text == "on"
        err.print(f"[dim]reasoning is {'shown' if self.reasoning else 'not shown'}[/dim]")

    def save(self, text: str) -> None:
        try:
            names = shlex.split(text)
        except ValueError:
            names = []
        if len(names) != 1:
            raise UsageError("/save takes the name of one file, for example /save chat.md")
        path = Path(names[0]).expanduser()
        parts = [f"**{e.question}**\n\n{e.answer}\n" for e in self.exchanges]
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join(parts))
        except FileExistsError:
            raise UsageError(f"{path} exists; choose another name.") from None
        except OSError as e:
            raise UsageError(f"{path} cannot be written ({e.strerror}); choose another place.") from None
        err.print(f"[dim]saved {len(parts)} questions and answers in[/dim] {path}")

    def end(self, _: str) -> None:
        self.ended = True


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str]] = {
    "help": (Chat.help, "this list"),
    "new": (Chat.new, "start a new conversation"),
    "again": (Chat.again, "answer the last question again"),
    "undo": (Chat.undo, "take the last question and its answer back"),
    "effort": (Chat.set_effort, "low, medium or high: how long the model may reason"),
    "reasoning": (Chat.show_reasoning, "on or off: show the reasoning"),
    "system": (Chat.set_system, "instructions for the model; alone: none"),
    "temperature": (Chat.set_temperature, "0 takes the likeliest token, 1 samples as the model was trained"),
    "save": (Chat.save, "write the conversation to a file, as markdown"),
    "exit": (Chat.end, "end; Ctrl+D does, too"),
}


def prompt_reader() -> Callable[[], str]:
    """A line editor with a history that outlives the session; what is pasted may have many lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History = InMemoryHistory()
    with suppress(OSError):  # a home that cannot be written to: the history ends with the session
        file = gates_.cache_folder("chat") / "history"
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        history = FileHistory(str(file))
    commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        "> ", history=history, completer=commands, complete_while_typing=False, key_bindings=keys,
        auto_suggest=AutoSuggestFromHistory(), prompt_continuation="  ",
    )  # fmt: skip
    return session.prompt


def register(app: typer.Typer) -> None:
    app.command()(chat)
