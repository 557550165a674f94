"""What `run`, `chat` and `generate` share: their options, and answers as they arrive, piece by piece.

An answer comes from an engine in this process, or from a server of this machine that has the model loaded already:
weights are not held twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, cast

import typer

from halfbyte.cli.options import DEVICE, DEVICES, SELF_TEST, err, open_engine
from halfbyte.errors import AskError, ContextError, HalfbyteError, PeerDiedError, StepError, UsageError
from halfbyte.flags import flag
from halfbyte.gates import Gates

if TYPE_CHECKING:
    import httpx

    from halfbyte.engine.python_api import Engine
    from halfbyte.engine.request import Delta
    from halfbyte.harmony.parse import Event

EFFORTS = ("low", "medium", "high")
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show the model's reasoning as well.")]


class Piece(NamedTuple):
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
    system: str | None = flag(None, "--system", "Instructions for the model.")


@dataclass(frozen=True)
class Place:
    """Where the model is that answers. Each field is also an option."""

    here: bool = flag(False, "--here", "Load the model here even if a running server already has it.")
    device: str | None = flag(None, "--device", DEVICE, values=DEVICES)
    self_test: str = flag("auto", "--self-test", SELF_TEST)


class Answers(Protocol):
    label: str

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[Piece]:
        """The answer to `question` after what was said before."""
        ...


class EngineAnswers:
    def __init__(self, engine: Engine, label: str) -> None:
        self.engine = engine
        self.label = label

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[Piece]:
        from halfbyte.engine.request import SamplingParams
        from halfbyte.harmony.messages import Message, opening
        from halfbyte.harmony.parse import Parser
        from halfbyte.harmony.render import render_prompt

        messages = opening(check_effort(manner.effort), manner.system)
        for exchange in before:
            messages += [Message.user(exchange.question), Message.final(exchange.answer)]
        prompt = render_prompt(self.engine.tokenizer, [*messages, Message.user(question)])
        sampling = SamplingParams(temperature=manner.temperature, max_tokens=manner.max_tokens, seed=manner.seed)
        parser = Parser(self.engine.tokenizer)
        for delta in deltas(self.engine.iterate(prompt, sampling)):
            yield from pieces_of(parser.feed(delta.tokens))
        yield from pieces_of(parser.finish())


class ServerAnswers:
    """By the public API, as every other client does."""

    def __init__(self, url: str, model: str, certificate: str | None = None) -> None:
        self.url = url
        self.label = model
        self.certificate = certificate

    def pieces(self, before: Sequence[Exchange], question: str, manner: Manner) -> Iterator[Piece]:
        import httpx

        from halfbyte.cli.client import open_client

        messages = [{"role": "system", "content": manner.system}] if manner.system else []
        for exchange in before:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": question})
        body = {
            "model": self.label, "messages": messages, "stream": True, "temperature": manner.temperature,
            "reasoning_effort": manner.effort.lower(), "max_tokens": manner.max_tokens, "seed": manner.seed,
        }  # fmt: skip
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


def _read(reply: httpx.Response) -> Iterator[Piece]:
    for line in reply.iter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        chunk: dict[str, Any] = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            raise StepError(str(chunk["error"].get("message", "the server failed on this request.")))
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("reasoning_content"):
                yield Piece("reasoning", text)
            if text := delta.get("content"):
                yield Piece("content", text)


@contextmanager
def open_answers(model: str | None, place: Place, gates: Gates) -> Iterator[Answers]:
    """A running server's, where one has this very model and no kernels and no device were chosen; else an engine's."""
    from halfbyte.cli import servers

    if not place.here and place.device is None and not gates.changes():
        server = next((s for s in servers.running() if s.url and (model or "tiny") in s.names), None)
        if server is not None and server.url is not None:
            err.print(f"[dim]{server.model}, asked of the server at {server.url} (--here loads it again)[/dim]")
            yield ServerAnswers(server.url, server.model, server.certificate)
            return
    from halfbyte.model import load

    with open_engine(model, place.device, gates, self_test=place.self_test) as engine:
        yield EngineAnswers(engine, load.resolve_model(model).label)


def pieces_of(events: list[Event]) -> list[Piece]:
    """Everything that is not reasoning is shown."""
    return [Piece("reasoning" if e.header.kind == "reasoning" else "content", e.text) for e in events if e.text]


def deltas(stream: Iterator[Delta]) -> Iterator[Delta]:
    for delta in stream:
        if delta.finish == "error":
            raise StepError(delta.error or "the engine failed on this request.")
        yield delta
