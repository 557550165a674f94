"""Asks an engine one thing or many at once, over OpenAI's HTTP API, and keeps what the last requests were.

This is for judging answers, not for timing them (`lab/measure/http_client.py` does that). Prompts are texts or token
ids. An answer that does not come, is no answer, or counts its tokens otherwise than it sends them is an AskError that
says which.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from halfbyte.errors import AskError

KEPT = 50  # of the last requests


@dataclass(frozen=True)
class Question:
    prompt: str | Sequence[int]
    tokens: int = 32  # at most
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    exactly: bool = False  # nothing stops it early

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model, "prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt),
            "max_tokens": self.tokens, "temperature": self.temperature, "stream": False,
        }  # fmt: skip
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


@dataclass(frozen=True)
class Asked:
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
        self.last: deque[Asked] = deque(maxlen=KEPT)
        self._native = dialect == "llama.cpp"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # an engine may die between two
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, limits=limits, trust_env=False)
        self._model = ""

    def close(self) -> None:
        self._http.close()

    @property
    def model(self) -> str:
        if not self._model:
            try:
                answer = self._http.get("/v1/models")
                answer.raise_for_status()
                self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as e:
                raise AskError(f"{self.url}/v1/models is no list of models ({_said(e)}).") from None
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
            raise AskError(f"{self.url}{path}: {_said(e)}.") from None

    def ask(self, question: Question) -> Reply:
        body = native_body(question) if self._native else question.body(self.model) | {"return_token_ids": True}
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
            self.last.append(Asked(at, prompt[:200], question.tokens, outcome, time.perf_counter() - begun))

    def ask_all(self, questions: Sequence[Question], at_once: int) -> list[Reply | AskError]:
        """Each question's reply, or why it has none; `at_once` of them under way together."""

        def one(question: Question) -> Reply | AskError:
            try:
                return self.ask(question)
            except AskError as e:
                return e

        with ThreadPoolExecutor(at_once, thread_name_prefix="asker") as pool:
            return list(pool.map(one, questions))

    def _answer(self, body: Mapping[str, Any]) -> Reply:
        begun = time.perf_counter()
        try:
            answer = self._http.post("/completion" if self._native else "/v1/completions", json=body)
        except httpx.TimeoutException:
            raise AskError(f"no answer within {self.timeout_s:g} s") from None
        except httpx.HTTPError as e:
            raise AskError(f"the connection failed ({_said(e)})") from None
        seconds = time.perf_counter() - begun
        if answer.status_code != 200:
            raise AskError(f"HTTP {answer.status_code}: {answer.text[:300].strip() or 'without a word'}")
        try:
            read = read_native if self._native else read_reply
            return read(json.loads(answer.text), seconds)
        except (ValueError, LookupError, TypeError) as e:
            raise AskError(f"not an answer of /v1/completions ({_said(e)}): {answer.text[:200]!r}") from None


def read_reply(raw: Any, seconds: float) -> Reply:
    choice, usage = raw["choices"][0], raw["usage"]
    ids = choice.get("token_ids")
    logprobs = choice.get("logprobs") or {}
    pieces: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    top: tuple[Mapping[str, float], ...] = ()
    if "content" in logprobs:  # llama.cpp answers in the form of chat completions
        rows = logprobs["content"] or []
        pieces = tuple(str(r["token"]) for r in rows)
        values = tuple(_number(r["logprob"]) for r in rows)
        top = tuple({str(t["token"]): _number(t["logprob"]) for t in r.get("top_logprobs") or []} for r in rows)
    elif logprobs:
        pieces = tuple(map(str, logprobs["tokens"]))
        values = tuple(_number(v) for v in logprobs["token_logprobs"])
        top = tuple({k: _number(v) for k, v in (t or {}).items()} for t in logprobs.get("top_logprobs") or [])
    return Reply(
        str(choice["text"]), str(choice.get("finish_reason") or ""), int(usage["prompt_tokens"]),
        int(usage["completion_tokens"]), None if ids is None else tuple(map(int, ids)), pieces, values, top, seconds,
    )  # fmt: skip


def native_body(question: Question) -> dict[str, Any]:
    """The same question for llama.cpp. Its samplers are switched off but for temperature, as the others have it."""
    body: dict[str, Any] = {
        "prompt": question.prompt if isinstance(question.prompt, str) else list(question.prompt),
        "n_predict": question.tokens, "temperature": question.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": True, "stream": False,
    }  # fmt: skip
    if question.seed is not None:
        body["seed"] = question.seed
    if question.logprobs is not None:
        body["n_probs"] = question.logprobs
    if question.exactly:
        body["ignore_eos"] = True
    return body


def read_native(raw: Any, seconds: float) -> Reply:
    rows = raw.get("completion_probabilities") or []
    ids = tuple(map(int, raw["tokens"]))
    return Reply(
        str(raw["content"]), "length" if raw.get("stop_type") == "limit" else "stop", int(raw["tokens_evaluated"]),
        int(raw["tokens_predicted"]), ids, tuple(str(r["token"]) for r in rows),
        tuple(_number(r["logprob"]) for r in rows),
        tuple({str(t["token"]): _number(t["logprob"]) for t in r.get("top_logprobs") or []} for r in rows), seconds,
    )  # fmt: skip


def _number(value: Any) -> float:
    """A log probability as it came; one that is no number stays visible as NaN."""
    return math.nan if value is None else float(value)


def _said(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
