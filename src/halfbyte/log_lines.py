"""Log lines for machines: one JSON object a line, with the id of the request that it belongs to.

What is learnt about a request while it runs is noted beside it and written once, with the line that ends it. Nothing
here knows prompts or answers: those who note give numbers and names. Text for people is logging's own affair.
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
    """Everything logged inside, and in tasks begun inside, carries this id; yields what is noted of the request."""
    facts: dict[str, Any] = {"request_id": id}
    token = _request.set(facts)
    try:
        yield facts
    finally:
        _request.reset(token)


def note(**facts: Any) -> None:
    """Keep facts for the line that ends the request, if there is one."""
    known = _request.get()
    if known is not None:
        known.update(facts)


class JsonLines(logging.Formatter):
    """`facts` of a record (`extra={"facts": ...}`) become fields of their own. ASCII only: what is not printable is
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
        known = _request.get()
        if known is not None:
            line["request_id"] = known["request_id"]
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_json(process: str) -> None:
    """From here on every logger of this process writes JSON to stderr, ours with a line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("halfbyte").setLevel(logging.INFO)
    logging.captureWarnings(True)
