"""What `run`, `chat` and `generate` share: their options, and answers as they arrive, piece by piece.

An answer comes from an engine in this process, or from a server of this machine that has the model loaded already:
weights are not held twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, cast

import typer

from halfbyte.cli.options import DEVICE, DEVICES, SELF_TEST, err, open_engine
from halfbyte.errors import AskError, ContextError, HalfbyteError, PeerDiedError, StepError, UsageError
from halfbyte.flags import flag
from halfbyte.gates import Gates, cache_folder

if TYPE_CHECKING:
    import httpx

    from halfbyte.engine.options import EngineOptions
    from halfbyte.engine.python_api import Engine
    from halfbyte.engine.request import Delta
    from halfbyte.harmony.parse import Event

EFFORTS = ("low", "medium", "high")
PREFIX_OPTIONS = ("prefix_memory", "prefix_folder", "prefix_disk")
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show the model's reasoning as well.")]


class AnswerText(NamedTuple):
    kind: Literal["reasoning", "content"]
    text: str


class Exchange(NamedTuple):
    question: str
    answer: str


def check_effort(text: str) -> Literal["low", "medium", "high"]:
    if text.lower() not in EFFORTS:
        raise UsageError(f"there is no effort {text!r}; use low, medium or high.")
    return cast(Literal["low", "medium", "high"], text.lower())


@dataclass
class Manner:
    """How answers are to be; `chat` changes it as it goes. Each field is also an option."""

    max_tokens: int | None = flag(
        None, "--max-tokens", "The longest answer allowed, in tokens; by default the model decides when to stop.",
        spellings=("-n",), minimum=1,
    )  # fmt: skip
    temperature: float = flag(
        0.0, "--temperature", "How random the choice of each token is; 0 always takes the likeliest.",
        spellings=("-t",), minimum=0.0,
    )  # fmt: skip
    seed: int | None = flag(None, "--seed", "The same seed gives the same answer again.")
    effort: str = flag(
        "medium", "--effort", "How hard the model thinks first: low, medium or high.", parse=check_effort,
        values=EFFORTS,
    )  # fmt: skip
    max_reasoning_tokens: int | None = flag(
        None, "--max-reasoning-tokens", "End the reasoning after so many tokens and go on to the answer.",
        spellings=("--reasoning-budget",), minimum=0,
    )  # fmt: skip
    system: str | None = flag(None, "--system", "Instructions for the model.")


@dataclass(frozen=True)
class EngineChoice:
    """Where the model is that answers. Each field is also an option."""

    here: bool = flag(False, "--here", "Load the model here even if a running server already has it.")
    device: str | None = flag(None, "--device", DEVICE, values=DEVICES)
    self_test: str = flag("auto", "--self-test", SELF_TEST)
    verbose: bool = flag(False, "--verbose", "Say more about what runs, and what its rounding costs.")


def chat_messages(before: Sequence[Exchange], question: str) -> list[dict[str, str]]:
    out: list[dict[str, str]] = []
    for exchange in before:
        out += [{"role": "user", "content": exchange.question}, {"role": "assistant", "content": exchange.answer}]
    return [*out, {"role": "user", "content": question}]


class Answers(Protocol):
    label: str

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[AnswerText]:
        """The answer to `question` after what was said before."""
        ...


class EngineAnswers:
    def __init__(self, engine: Engine, label: str) -> None:
        self.engine = engine
        self.label = label

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[AnswerText]:
        stream = self.engine.chat(
            chat_messages(before, question), stream=True, temperature=manner.temperature, max_tokens=manner.max_tokens,
            seed=manner.seed, effort=check_effort(manner.effort), instructions=manner.system,
            max_reasoning_tokens=manner.max_reasoning_tokens,
        )  # fmt: skip
        for piece in stream:
            if piece.kind != "call":  # without tools there is none
                yield AnswerText(piece.kind, piece.text)


class ServerAnswers:
    """Answers of a running server, through its public API as every other client uses it."""

    def __init__(self, url: str, model: str, certificate: str | None = None) -> None:
        self.url = url
        self.label = model
        self.certificate = certificate

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[AnswerText]:
        import httpx

        from halfbyte.cli.client import open_client

        messages = [{"role": "system", "content": manner.system}] if manner.system else []
        messages += chat_messages(before, question)
        body: dict[str, Any] = {
            "model": self.label, "messages": messages, "stream": True, "temperature": manner.temperature,
            "reasoning_effort": manner.effort.lower(), "max_tokens": manner.max_tokens, "seed": manner.seed,
        }  # fmt: skip
        if manner.max_reasoning_tokens is not None:
            body["reasoning"] = {"max_tokens": manner.max_reasoning_tokens}
        try:
            with (
                open_client(self.url, self.certificate, timeout=10.0, reads_forever=True) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                if reply.status_code != 200:
                    raise _refusal(reply)
                yield from _read(reply)
        except httpx.HTTPError as e:
            raise PeerDiedError(
                f"the server at {self.url} does not answer ({type(e).__name__}); `halfbyte ps` lists those that run."
            ) from None


def _refusal(reply: httpx.Response) -> HalfbyteError:
    reply.read()
    try:
        error = reply.json()["error"]
        kind = ContextError if error.get("code") == "context_length_exceeded" else AskError
        return kind(str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return AskError(f"the server answers {reply.status_code}; is it a halfbyte server?")


def _read(reply: httpx.Response) -> Iterator[AnswerText]:
    for line in reply.iter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        chunk: dict[str, Any] = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            raise StepError(str(chunk["error"].get("message", "the server failed on this request.")))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("reasoning_content"):
                yield AnswerText("reasoning", text)
            if text := delta.get("content"):
                yield AnswerText("content", text)


@contextmanager
def open_answers(
    model: str | None, choice: EngineChoice, gates: Gates, options: EngineOptions | None = None
) -> Iterator[Answers]:
    """A running server's, where one has this very model and neither kernels, a device nor a place for prefixes were
    chosen; else an engine's."""
    from halfbyte.cli import servers

    prefixes = {name: getattr(options, name) for name in PREFIX_OPTIONS} if options is not None else {}
    if not choice.here and choice.device is None and not gates.changes() and not any(prefixes.values()):
        server = next((s for s in servers.running() if s.url and (model or "tiny") in s.names), None)
        if server is not None and server.url is not None:
            err.print(f"[dim]{server.model}, asked of the server at {server.url} (--here loads it again)[/dim]")
            yield ServerAnswers(server.url, server.model, server.certificate)
            return
    from halfbyte.model import load

    self_test = choice.self_test
    with open_engine(model, choice.device, gates, verbose=choice.verbose, self_test=self_test, **prefixes) as engine:
        yield EngineAnswers(engine, load.resolve_model(model).label)
    if not prefixes.get("prefix_folder"):
        suggest_prefix_folder()


def suggest_prefix_folder() -> None:
    """Mention --prefix-folder, once on this machine and to a person only."""
    if not sys.stderr.isatty():
        return
    marker = cache_folder("chat") / "prefix-folder"
    with suppress(OSError):
        marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        marker.touch(mode=0o600, exist_ok=False)  # raises if it was mentioned before
        err.print(
            "[dim]--prefix-folder DIR keeps the beginnings of prompts on disk, for their owner alone, so that a long "
            "prompt starts at once the next time (docs/server.md)[/dim]"
        )


def pieces_of(events: list[Event]) -> list[AnswerText]:
    """Everything that is not reasoning is shown."""
    return [AnswerText("reasoning" if e.header.kind == "reasoning" else "content", e.text) for e in events if e.text]


def deltas(stream: Iterator[Delta]) -> Iterator[Delta]:
    for delta in stream:
        if delta.finish == "error":
            raise StepError(delta.error or "the engine failed on this request.")
        yield delta
