"""The traffic of the soak: every API through its maker's own client, streamed and whole, cancelled and damaged.

Each attempt ends in a word: `answered` (whole and well-formed), `told` (an error that says that the engine was lost or
is not ready), `cancelled` (by us, in mid-stream), `refused` (damaged, and answered with a 4xx). Whatever else happens
raises `Lost`: an answer that stops in the middle, a cut connection, an error without its cause, no answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai

CONVERSATIONS, LONGEST_CONVERSATION = 12, 3000  # of agents, and tokens of one
LIMIT_S = 600.0  # for one request, whatever happens to the engine meanwhile, on whatever machine
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA}
QUESTIONS = (
    "What is 2 + 2?",
    "Hello!",
    "Name a city.",
    "Count to ten.",
    "Wie heißt du? 🙂",
    "Tell me a story of a dog.",
)
# Each is JSON that says something it may not, or is none at all.
DAMAGED = (
    b"{", b"\xff\xfe\x00", b"null", b"[" * 5000, b'{"model": 1}', b'{"messages": "x"}', b'{"model": "%s", "n": NaN}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"temperature":"hot"}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"n":0}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"stop":7}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"nonsense":true}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"logit_bias":{"99999999":1}}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"max_tokens":-7}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":'
    b'{"name":"t","schema":{"type":"nonsense"}}}}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":'
    b'{"name":"t","schema":{"$ref":"#"}}}}',
    b'{"model":"%s","messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":'
    b'{"name":"t","schema":{"type":"integer","multipleOf":9999991}}}}',
)  # fmt: skip
EXPECTED_ERRORS = ("this request was lost", "is being started again", "No request can be served now")


class Lost(Exception):
    """Something that must never happen to a request."""


class SoakClients:
    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S)
        self.kinds: dict[str, Callable[[random.Random], Awaitable[str]]] = {
            "chat": self.chat, "chat stream": self.chat_stream, "tools": self.tools, "schema": self.schema,
            "completion": self.completion, "responses": self.responses, "responses stream": self.responses_stream,
            "messages": self.messages, "messages stream": self.messages_stream, "cancel": self.cancel,
            "cancel messages": self.cancel_messages, "damaged": self.damaged, "half": self.half, "agent": self.agent,
        }  # fmt: skip
        self.conversations: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        self.answers: dict[bytes, list[int]] = {}  # digest of a prompt -> its greedy answer
        self.tier_tokens: Counter[str] = Counter()  # prompt tokens that agents' requests found, by tier

    async def close(self) -> None:
        await asyncio.gather(self.http.aclose(), self.openai.close(), self.anthropic.close())

    async def attempt(self, kind: str, draw: random.Random) -> str:
        try:
            async with asyncio.timeout(LIMIT_S + 30):
                return await self.kinds[kind](draw)
        except (openai.APIStatusError, anthropic.APIStatusError) as e:
            if e.status_code == 429 or any(word in str(e) for word in EXPECTED_ERRORS):
                return "told"
            raise Lost(f"{kind}: {e.status_code} {e}"[:300]) from None
        except (openai.APITimeoutError, anthropic.APITimeoutError, httpx.TimeoutException, TimeoutError):
            raise Lost(f"{kind}: no answer within {LIMIT_S:.0f} s") from None
        except openai.APIError as e:  # an error event in the stream, or a connection that broke
            if any(word in str(e) for word in EXPECTED_ERRORS):
                return "told"
            raise Lost(f"{kind}: {type(e).__name__}: {e}; {e.__cause__!r}"[:300]) from None
        except (anthropic.APIError, httpx.HTTPError, OSError) as e:
            raise Lost(f"{kind}: {type(e).__name__}: {e}; {e.__cause__!r}"[:300]) from None

    def _chat(self, draw: random.Random, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": draw.choice(QUESTIONS) * draw.choice((1, 1, 1, 20))}]
        return {
            "model": self.model, "messages": messages, "max_tokens": draw.randint(4, 80), "seed": draw.randrange(1000),
            "temperature": draw.choice((0.0, 0.7, 1.0)), **more,
        }  # fmt: skip

    # ---- OpenAI chat and completions ----------------------------------------------------------

    async def chat(self, draw: random.Random) -> str:
        n = draw.choice((1, 1, 3))
        out = await self.openai.chat.completions.create(**self._chat(draw, n=n))
        _need(len(out.choices) == n and all(c.finish_reason for c in out.choices), "chat", out)
        return "answered"

    async def chat_stream(self, draw: random.Random) -> str:
        stream = await self.openai.chat.completions.create(
            **self._chat(draw, stream=True, stream_options={"include_usage": True})
        )
        ended, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                ended = choice.finish_reason or ended
        _need(bool(ended) and usage is not None, "chat stream", (ended, usage))
        return "answered"

    async def tools(self, draw: random.Random) -> str:
        strict = draw.random() < 0.5
        functions = [{"type": "function", "function": {**TOOL, "strict": strict}}]
        body = self._chat(draw, tools=functions, tool_choice=draw.choice(("auto", "required")))
        out = await self.openai.chat.completions.create(**body | {"max_tokens": 150})
        choice = out.choices[0]
        for call in choice.message.tool_calls or ():
            # A function that nobody offered is the model's own idea, and has no schema to keep to.
            if choice.finish_reason == "tool_calls" and strict and call.function.name == TOOL["name"]:
                _need(set(json.loads(call.function.arguments)) == {"city", "days"}, "tools", out)
        return "answered"

    async def schema(self, draw: random.Random) -> str:
        format = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA, "strict": True}}
        body = self._chat(draw, response_format=format, reasoning_effort=draw.choice(("none", "low")))
        out = await self.openai.chat.completions.create(**body | {"max_tokens": 100})
        if out.choices[0].finish_reason == "stop":
            _need(set(json.loads(out.choices[0].message.content)) == {"city", "days"}, "schema", out)
        return "answered"

    async def completion(self, draw: random.Random) -> str:
        most = draw.randint(1, 60)
        out = await self.openai.completions.create(model=self.model, prompt=draw.choice(QUESTIONS), max_tokens=most)
        _need(out.usage is not None and out.usage.completion_tokens <= most, "completion", out)
        return "answered"

    async def agent(self, draw: random.Random) -> str:
        """A turn of a conversation that grows, or the last one again. Equal prompts have equal answers, whatever became
        of the engine meanwhile and wherever their beginning was found."""
        number = draw.randrange(len(self.conversations))
        history = self.conversations[number]
        if not history or len(history) > LONGEST_CONVERSATION:
            history = [draw.randrange(10, 1000) for _ in range(draw.randint(300, 1500))]
        prompt = list(history)
        out = await self.openai.completions.create(
            model=self.model, prompt=prompt, max_tokens=16, temperature=0.0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        answer = [int(t) for t in out.choices[0].model_extra["token_ids"]]
        digest = blake2b(repr(prompt).encode(), digest_size=16).digest()
        before = self.answers.setdefault(digest, answer)
        _need(answer == before, "agent", f"{len(prompt)} tokens were answered with {before}, and now with {answer}")
        self.tier_tokens.update(out.usage.model_extra["cached_tokens_by_tier"])
        if draw.random() < 0.7:
            history = prompt + answer + [draw.randrange(10, 1000) for _ in range(draw.randint(10, 150))]
        self.conversations[number] = history
        return "answered"

    # ---- OpenAI responses ---------------------------------------------------------------------

    async def responses(self, draw: random.Random) -> str:
        body: Any = {"model": self.model, "input": draw.choice(QUESTIONS), "max_output_tokens": draw.randint(16, 80)}
        first = await self.openai.responses.create(**body)
        _need(first.status in ("completed", "incomplete"), "responses", first)
        if draw.random() < 0.5:
            try:
                second = await self.openai.responses.create(**body, previous_response_id=first.id)
            except openai.NotFoundError as e:
                raise Lost(f"a stored response is gone: {e}") from None
            _need(second.status in ("completed", "incomplete"), "responses", second)
        return "answered"

    async def responses_stream(self, draw: random.Random) -> str:
        stream = await self.openai.responses.create(
            model=self.model, input=draw.choice(QUESTIONS), max_output_tokens=draw.randint(16, 80), stream=True
        )
        last: Any = None
        async for event in stream:
            last = event
        if last.type in ("response.failed", "error") and any(word in str(last) for word in EXPECTED_ERRORS):
            return "told"
        _need(last.type in ("response.completed", "response.incomplete"), "responses stream", last)
        return "answered"

    # ---- Anthropic ----------------------------------------------------------------------------

    def _messages(self, draw: random.Random) -> Any:
        return {
            "model": self.model, "max_tokens": draw.randint(4, 80),
            "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
        }  # fmt: skip

    async def messages(self, draw: random.Random) -> str:
        out = await self.anthropic.messages.create(**self._messages(draw))
        _need(out.stop_reason is not None, "messages", out)
        return "answered"

    async def messages_stream(self, draw: random.Random) -> str:
        last = ""
        async for event in await self.anthropic.messages.create(**self._messages(draw), stream=True):
            last = event.type
        _need(last == "message_stop", "messages stream", last)
        return "answered"

    # ---- those who leave, and those who send damage -------------------------------------------

    async def cancel(self, draw: random.Random) -> str:
        body = self._chat(draw, stream=True, n=draw.choice((1, 2)), extra_body={"ignore_eos": True})
        stream = await self.openai.chat.completions.create(**body | {"max_tokens": 1000})
        left = draw.randint(0, 20)
        async for _ in stream:
            if left <= 0:
                break
            left -= 1
        await stream.close()
        return "cancelled"

    async def cancel_messages(self, draw: random.Random) -> str:
        stream = await self.anthropic.messages.create(**self._messages(draw) | {"max_tokens": 1000}, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return "cancelled"

    async def damaged(self, draw: random.Random) -> str:
        body = draw.choice(DAMAGED).replace(b"%s", self.model.encode())
        path = "/v1/messages" if draw.random() < 0.2 else "/v1/chat/completions"
        answer = await self.http.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code == 503 and any(word in answer.text for word in EXPECTED_ERRORS):
            return "told"
        _need(400 <= answer.status_code < 500, f"damaged {body[-60:]!r}", (answer.status_code, answer.text))
        _need("error" in answer.json(), "damaged", answer.text)
        return "refused"

    async def half(self, draw: random.Random) -> str:
        """Less of a request than it promises, then gone; or bytes that are no HTTP."""
        parts = urlsplit(self.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 1000\r\n\r\n".encode()
        data = draw.choice(
            (head, head[:40], head + b'{"model":', b"\x16\x03\x01\x02\x00" * 40, b"GET / HTTP/9.9\r\n\r\n")
        )
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(draw.random())
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return "refused"


def _need(fact: bool, kind: str, seen: Any) -> None:
    if not fact:
        raise Lost(f"{kind}: {seen}"[:400])
