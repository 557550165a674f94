"""What the chunks of chat completions and completions have in common: the frame around choices, and the usage.

Chunks are written by hand: a stream encodes its text and nothing else.
"""

from __future__ import annotations

import time
from typing import Any

from halfbyte.engine.request import SourceInfo
from halfbyte.server.answer.generate import Totals
from halfbyte.server.api.shared_schema import SamplingFields, left_out_header
from halfbyte.server.http import sse
from halfbyte.server.http.errors import ApiError


class ChunkFrame:
    """The fields around `choices` in one object and in every chunk of it."""

    def __init__(
        self, prefix: str, object: str, chunk_object: str, model: str, body: SamplingFields, info: SourceInfo
    ) -> None:
        self.headers = left_out_header(body.left_out)
        self.fields: dict[str, Any] = {
            "id": sse.new_id(prefix),
            "object": object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": info.details.get("fingerprint", "halfbyte"),
        }
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._head = b"data: " + sse.dumps({**self.fields, "object": chunk_object})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def chunk(self, choice: bytes, totals: Totals) -> bytes:
        if self._running_usage:
            return self._head + choice + self._usage_tail(totals)
        return self._head + choice + self._tail

    def end(self, totals: Totals) -> bytes:
        return (self._head + self._usage_tail(totals) if self._usage else b"") + sse.DONE

    def _usage_tail(self, totals: Totals) -> bytes:
        return b'],"usage":' + sse.dumps(usage(totals)) + b"}\n\n"

    def body(self, choices: list[dict[str, Any]], totals: Totals) -> dict[str, Any]:
        return {**self.fields, "choices": choices, "usage": usage(totals)}


def finish_json(finish: str | None) -> bytes:
    return b'"%s"' % finish.encode() if finish else b"null"


def finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999 for a token that could not have been chosen."""
    return logprob if logprob > -9999.0 else -9999.0


def error_chunk(error: ApiError) -> bytes:
    return sse.data(error.openai())


def usage_extensions(t: Totals) -> dict[str, Any]:
    """What OpenAI's usage has no field for: from which tier cached tokens came (KV pages, host memory, the disk), and
    whether a limit has ended the reasoning. Not among the details, which hold numbers alone: clients insist on it."""
    tiers = {"pages": t.cached - t.from_memory - t.from_disk, "memory": t.from_memory, "disk": t.from_disk}
    return {"cached_tokens_by_tier": tiers} | ({"reasoning_cut": True} if t.reasoning_cut else {})


def usage(t: Totals) -> dict[str, Any]:
    return {
        "prompt_tokens": t.prompt,
        "completion_tokens": t.completion,
        "total_tokens": t.prompt + t.completion,
        "prompt_tokens_details": {"cached_tokens": t.cached},
        "completion_tokens_details": {"reasoning_tokens": t.reasoning},
        **usage_extensions(t),
    }
