"""Asks an engine one thing or many at once, over OpenAI's HTTP API, and keeps what the last requests were.

This is for judging answers, not for timing them (`lab/measure/http_client.py` does that). Prompts are texts or token
ids. An answer that does not come, is no answer, or counts its tokens otherwise than it sends them is an AskError that
says which.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from halfbyte.errors import AskError, EngineError, InvalidFigureError
from halfbyte.lab.measure.event_stream import read_blocks

REMEMBERED = 50  # of the last requests
Logprobs = tuple[tuple[str, ...], tuple[float, ...], tuple[Mapping[str, float], ...]]  # pieces, values, best ones


@dataclass(frozen=True)
class Question:
    prompt: str | Sequence[int]
    tokens: int = 32  # at most
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    exactly: bool = False  # nothing stops it early
    echo: bool = False  # the prompt comes first, with its own log probabilities
    stream: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # further ones, by their names in OpenAI's API

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model, "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "max_tokens": self.tokens, "temperature": self.temperature, "stream": self.stream, **self.settings,
        }  # fmt: skip
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.echo:
            body["echo"] = True
        if self.seed is not None:
            body["seed"] = self.seed
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        if self.exactly:
            body["ignore_eos"] = True
        return body


@dataclass(frozen=True)
class Reply:
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[int, ...] | None  # ids, where the engine gives them
    pieces: tuple[str, ...] = ()  # of the text, one a token, with log probabilities
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[str, float], ...] = ()
    seconds: float = 0.0


def drawable(top: Mapping[str, float]) -> dict[str, float]:
    """The tokens that may follow where nothing may end an answer. llama.cpp never draws the end then, and names it with
    its probability all the same, by an empty text."""
    return {piece: value for piece, value in top.items() if piece}


@dataclass(frozen=True)
class PastRequest:
    """One of the last requests, for diagnostics."""

    at: float  # seconds since the epoch
    prompt: str  # its beginning
    tokens: int
    outcome: str
    seconds: float


class Asker:
    """`dialect` is "openai", or "llama.cpp" for its own /completion: only there it says which tokens it took."""

    def __init__(self, url: str, *, timeout_s: float = 120.0, dialect: str = "openai") -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.last: deque[PastRequest] = deque(maxlen=REMEMBERED)
        self._native = dialect == "llama.cpp"
        # One connection a request: an engine may die between two. The header closes them, and not a limit of idle ones:
        # with that limit a thread may take up a connection that another thread's pool is closing.
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout_s, limits=httpx.Limits(max_connections=None),
            headers={"Connection": "close"}, trust_env=False,
        )  # fmt: skip
        self._model = ""

    def close(self) -> None:
        self._http.close()

    @property
    def native(self) -> bool:
        """Whether questions go to llama.cpp's own API."""
        return self._native

    @property
    def model(self) -> str:
        if not self._model:
            try:
                answer = self._http.get("/v1/models")
                answer.raise_for_status()
                self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
                raise AskError(f"{self.url}/v1/models is no list of models ({_reason(e)}).") from None
        return self._model

    def healthy(self, path: str, timeout_s: float = 5.0) -> bool:
        try:
            return self._http.get(path, timeout=timeout_s).status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> Any:
        """A JSON document of the engine's, or an AskError."""
        try:
            answer = self._http.get(path)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as e:
            raise AskError(f"{self.url}{path}: {_reason(e)}.") from None

    def metric(self, name: str) -> float:
        """The sum of a counter's samples on the engine's page of metrics; 0 where it has none."""
        try:
            text = self._http.get("/metrics").text
        except httpx.HTTPError as e:
            raise AskError(f"{self.url}/metrics: {_reason(e)}.") from None
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if re.match(rf"{name}(_total)?[ {{]", line)]
        return sum(float(value) for _, value in rows)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON body, or the text of an event stream; an AskError names any other status."""
        begin, at, outcome = time.perf_counter(), time.time(), "no answer"
        try:
            answer = self._http.post(path, json=body)
            outcome = f"HTTP {answer.status_code}"
            if answer.status_code != 200:
                raise AskError(f"{outcome}: {answer.text[:300].strip() or 'empty body'}")
            return answer.text if body.get("stream") else answer.json()
        except (httpx.HTTPError, ValueError) as e:
            raise AskError(f"{self.url}{path}: {_reason(e)}.") from None
        finally:
            self.last.append(PastRequest(at, str(body)[:200], 0, outcome, time.perf_counter() - begin))

    def ask(self, question: Question) -> Reply:
        body = self._body(question)
        begun, at = time.perf_counter(), time.time()
        outcome = "no answer"
        try:
            reply = self._answer(body)
            outcome = f"{reply.completion_tokens} tokens, {reply.finish}"
            return reply
        except AskError as e:
            outcome = str(e)
            raise
        finally:
            prompt = question.prompt if isinstance(question.prompt, str) else f"{len(question.prompt)} token ids"
            self.last.append(PastRequest(at, prompt[:200], question.tokens, outcome, time.perf_counter() - begun))

    @contextlib.contextmanager
    def opened(self, question: Question) -> Iterator[None]:
        """A streamed answer, from its first bytes to the end of the block, where its client leaves."""
        body = self._body(replace(question, stream=True))
        try:
            with self._http.stream("POST", self._path, json=body) as answer:
                if answer.status_code != 200:
                    raise AskError(f"HTTP {answer.status_code}: {answer.read()[:300].decode(errors='replace')}")
                next(answer.iter_raw(), None)
                yield
        except httpx.HTTPError as e:
            raise AskError(f"the connection failed ({_reason(e)})") from None

    def ask_all(self, questions: Sequence[Question], at_once: int) -> list[Reply | AskError]:
        """Each question's reply, or why it has none; `at_once` of them under way together."""

        def one(question: Question) -> Reply | AskError:
            try:
                return self.ask(question)
            except AskError as e:
                return e

        with ThreadPoolExecutor(at_once, thread_name_prefix="asker") as pool:
            return list(pool.map(one, questions))

    @property
    def _path(self) -> str:
        return "/completion" if self._native else "/v1/completions"

    def _body(self, question: Question) -> dict[str, Any]:
        return native_body(question) if self._native else question.body(self.model) | {"return_token_ids": True}

    def _answer(self, body: Mapping[str, Any]) -> Reply:
        begun = time.perf_counter()
        try:
            answer = self._http.post(self._path, json=body)
        except httpx.TimeoutException:
            raise AskError(f"no answer within {self.timeout_s:g} s") from None
        except httpx.HTTPError as e:
            raise AskError(f"the connection failed ({_reason(e)})") from None
        seconds = time.perf_counter() - begun
        if answer.status_code != 200:
            raise AskError(f"HTTP {answer.status_code}: {answer.text[:300].strip() or 'empty body'}")
        try:
            if body.get("stream"):
                read_events = read_native_stream if self._native else read_streamed
                return read_events(answer.content, seconds)
            read = read_native if self._native else read_reply
            return read(json.loads(answer.text), seconds)
        except (EngineError, InvalidFigureError) as e:
            raise AskError(str(e)) from None
        except (ValueError, LookupError, TypeError) as e:
            raise AskError(f"not an answer of /v1/completions ({_reason(e)}): {answer.text[:200]!r}") from None


def read_reply(raw: Any, seconds: float) -> Reply:
    choice, usage = raw["choices"][0], raw["usage"]
    ids = choice.get("token_ids")
    return Reply(
        str(choice["text"]), str(choice.get("finish_reason") or ""), int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]), None if ids is None else tuple(map(int, ids)),
        *read_logprobs(choice.get("logprobs") or {}), seconds,
    )  # fmt: skip


def read_logprobs(logprobs: Mapping[str, Any]) -> Logprobs:
    if "content" in logprobs:  # llama.cpp answers in the form of chat completions
        return _chat_logprobs(logprobs["content"] or [])
    top = tuple({k: _number(v) for k, v in (t or {}).items()} for t in logprobs.get("top_logprobs") or [])
    values = tuple(map(_number, logprobs.get("token_logprobs") or []))
    return tuple(map(str, logprobs.get("tokens") or [])), values, top


def read_streamed(body: bytes, seconds: float) -> Reply:
    """An answer that came as events. One without its end is an AskError."""
    if b"data: [DONE]" not in body:
        raise AskError("the stream ended without its end ([DONE])")
    reading = read_blocks([(0.0, body)])
    if not reading.finish:
        raise AskError("the stream ended without a finish_reason")
    events = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data: {")]
    parts = [read_logprobs(c["logprobs"]) for e in events for c in e.get("choices") or () if c.get("logprobs")]
    pieces = tuple(piece for part in parts for piece in part[0])
    values = tuple(value for part in parts for value in part[1])
    top = tuple(best for part in parts for best in part[2])
    return Reply(
        reading.text, reading.finish, reading.prompt_tokens or 0, reading.completion_tokens or 0,
        tuple(reading.tokens) or None, pieces, values, top, seconds,
    )  # fmt: skip


def _chat_logprobs(rows: Sequence[Mapping[str, Any]]) -> Logprobs:
    top = ({str(t["token"]): _number(t["logprob"]) for t in r.get("top_logprobs") or []} for r in rows)
    return tuple(str(r["token"]) for r in rows), tuple(_number(r["logprob"]) for r in rows), tuple(top)


def native_body(question: Question) -> dict[str, Any]:
    """The question in llama.cpp's own API. Its samplers are switched off but for temperature, as the others have it."""
    body: dict[str, Any] = {
        "prompt": question.prompt if isinstance(question.prompt, str) else list(question.prompt),
        "n_predict": question.tokens, "temperature": question.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": True, "stream": question.stream,
        **question.settings,
    }  # fmt: skip
    if bias := question.settings.get("logit_bias"):
        body["logit_bias"] = [[int(token), value] for token, value in bias.items()]
    if question.echo:
        raise AskError("llama.cpp's server scores no prompts")
    if question.seed is not None:
        body["seed"] = question.seed
    if question.logprobs is not None:
        body["n_probs"] = question.logprobs + question.exactly  # one may be the end (`drawable`)
    if question.exactly:
        body["ignore_eos"] = True
    return body


def read_native(raw: Any, seconds: float) -> Reply:
    return Reply(
        str(raw["content"]), "length" if raw.get("stop_type") == "limit" else "stop", int(raw["tokens_evaluated"]),
        int(raw["tokens_predicted"]), tuple(map(int, raw["tokens"])),
        *_chat_logprobs(raw.get("completion_probabilities") or []), seconds,
    )  # fmt: skip


def read_native_stream(body: bytes, seconds: float) -> Reply:
    """Events of llama.cpp's own API; the last one has the counts. Without it the stream has no end: an AskError."""
    events = [json.loads(line[5:]) for line in body.splitlines() if line.startswith(b"data:")]
    if not events or not events[-1].get("stop"):
        raise AskError("the stream ended without its last event")
    text = "".join(str(e.get("content", "")) for e in events)
    tokens = [int(t) for e in events for t in e.get("tokens") or ()]
    scores = [row for e in events for row in e.get("completion_probabilities") or ()]
    joined = {"content": text, "tokens": tokens, "completion_probabilities": scores}
    return read_native({**events[-1], **joined}, seconds)


def _number(value: Any) -> float:
    """A log probability as it came; one that is no number stays visible as NaN."""
    return math.nan if value is None else float(value)


def _reason(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
