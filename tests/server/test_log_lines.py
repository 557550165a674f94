"""JSON log lines: one object a line, a line a request, with its id and its numbers and without its words."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import Live, wait_until
from scripted import Play, ScriptedSource, say

from halfbyte import log_lines
from halfbyte.errors import UsageError


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What would be written, parsed."""
    found: list[dict[str, Any]] = []
    formatter = log_lines.JsonLines("server")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = formatter.format(record)
            assert "\n" not in text
            found.append(json.loads(text))

    handler, log = Keep(), logging.getLogger("halfbyte")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def test_a_request_has_one_line_with_its_numbers(
    serve: Callable[..., Live], http: httpx.Client, lines: list[dict[str, Any]]
) -> None:
    live = serve(ScriptedSource(lambda request, choice: Play(say("the secret answer", "thought"))))
    body = {"model": "gpt-oss-test", "messages": [{"role": "user", "content": "the secret question"}]}
    for stream, name in ((False, "mine-1"), (True, "mine-2")):
        answer = http.post(
            f"{live.url}/v1/chat/completions", json=body | {"stream": stream}, headers={"x-request-id": name}
        )
        assert answer.status_code == 200
        wait_until(lambda name=name: any(line.get("request_id") == name and "status" in line for line in lines))
        (line,) = [line for line in lines if line.get("request_id") == name and "status" in line]
        assert (line["level"], line["logger"], line["process"]) == ("info", "halfbyte.access", "server")
        assert (line["method"], line["path"], line["route"], line["status"]) == (
            "POST", "/v1/chat/completions", "/v1/chat/completions", 200,
        )  # fmt: skip
        assert (line["api"], line["finish"]) == ("chat", "stop")
        assert line["completion_tokens"] > line["reasoning_tokens"] > 0
        assert line["prompt_tokens"] > 0
        assert line["ms"] >= line["first_token_ms"] >= 0
        assert line["time"].endswith("Z")
    assert "secret" not in json.dumps(lines)


def test_a_refusal_says_why(serve: Callable[..., Live], http: httpx.Client, lines: list[dict[str, Any]]) -> None:
    live = serve(ScriptedSource(lambda request, choice: Play(say("x")), ready=False))
    http.post(f"{live.url}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r"})
    wait_until(lambda: any("status" in line for line in lines))
    (line,) = [line for line in lines if line.get("request_id") == "r" and "status" in line]
    assert (line["status"], line["refused"]) == (503, "not_ready")


def test_text_from_outside_cannot_begin_a_line() -> None:
    record = logging.makeLogRecord(
        {"msg": 'a\n{"level": "error"}\u2028\x1b[31m', "levelname": "WARNING", "name": "halfbyte"}
    )
    text = log_lines.JsonLines("engine").format(record)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["message"] == record.getMessage()


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("bad")
    except ValueError as e:
        record = logging.makeLogRecord({"msg": "it failed", "exc_info": (type(e), e, e.__traceback__)})
    assert "ValueError: bad" in json.loads(log_lines.JsonLines("server").format(record))["exception"]


def test_notes_outside_a_request_go_nowhere() -> None:
    log_lines.note(tokens=1)
    with log_lines.request("a") as facts:
        log_lines.note(tokens=2)
    assert facts == {"request_id": "a", "tokens": 2}


def test_there_are_two_formats() -> None:
    with pytest.raises(UsageError, match="text or json"):
        log_lines.parse_format("xml")
