"""Log lines for machines: one JSON object per line, with the id of its request.

Facts about a running request are collected and written once, with its last line. They are numbers and names, never
prompts or answers. Text logs for people use Python's logging unchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from halfbyte.errors import UsageError

FORMATS = ("text", "json")

_request: ContextVar[dict[str, Any] | None] = ContextVar("halfbyte_request", default=None)


def parse_format(text: str) -> str:
    if text not in FORMATS:
        raise UsageError(f"--log-format is {text!r}; use {' or '.join(FORMATS)}.")
    return text


@contextmanager
def request(id: str) -> Iterator[dict[str, Any]]:
    """Give this id to all lines logged within the context and by tasks started in it; yields the request's facts."""
    facts: dict[str, Any] = {"request_id": id}
    token = _request.set(facts)
    try:
        yield facts
    finally:
        _request.reset(token)


def note(**facts: Any) -> None:
    """Keep facts for the line that ends the request, if there is one."""
    request = _request.get()
    if request is not None:
        request.update(facts)


class JsonLines(logging.Formatter):
    """Writes the `facts` of a record (`extra={"facts": ...}`) as fields. The output is ASCII: other characters are
    escaped, so that no text from outside can begin a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self.process,
            "message": record.getMessage(),
        }
        request = _request.get()
        if request is not None:
            line["request_id"] = request["request_id"]
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_json(process: str) -> None:
    """Make every logger of this process write JSON to stderr, with a line for each request from halfbyte's."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("halfbyte").setLevel(logging.INFO)
    logging.captureWarnings(True)
