"""Requests as a real program sends them: recorded in front of the server, kept as fixtures, played again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TRANSCRIPTS = Path(__file__).parent / "data" / "transcripts"
# Of the machine that it was recorded on.
PRIVATE = (
    (r"/tmp/pytest-of-\w+/pytest-\d+/\w+", "/home/user"),
    (r"OS Version: [^\\\n]*", "OS Version: Linux"),
    (r"((?:device|session|installation)_id\W+)[0-9a-f-]{32,64}", r"\g<1>0"),
)
LONGEST = 400  # characters of a text in a fixture; Codex's instructions alone are many thousands


class Recorder:
    """An ASGI application before the server's own. Notes what has a JSON body, in order of arrival."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        entry: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "body": None, "status": None}
        self.requests.append(entry)
        body = b""

        async def listen() -> Any:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message.get("body", b"")
                if not message.get("more_body") and body:
                    entry["body"] = json.loads(body)
            return message

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
            elif entry["status"] >= 400:
                entry["refusal"] = entry.get("refusal", "") + message.get("body", b"").decode()
            await send(message)

        await self.app(scope, listen, note)

    @property
    def refused(self) -> list[str]:
        """What went wrong, in the server's words."""
        bad = [r for r in self.requests if r["status"] is None or r["status"] >= 400]
        return [f"{r['method']} {r['path']}: {r['status']} {r.get('refusal')}" for r in bad]


def shortened(value: Any) -> Any:
    """Long texts cut: what a server has to understand is the shape. A grammar or a schema is not text, and stays."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[:LONGEST]} [cut]"
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, dict):
        kept = ("arguments", "definition", "encrypted_content", "signature", "thinking")
        return {k: v if k in kept else shortened(v) for k, v in value.items()}
    return value


def write_fixture(name: str, program: str, requests: list[dict[str, Any]], answers: list[str]) -> None:
    """`answers` are the plays that the scripted source gave: the same are given when the requests are played again."""
    asked = [{k: shortened(v) for k, v in r.items() if k != "status"} for r in requests if r["body"] is not None]
    fixture = {"program": program, "answers": answers, "requests": asked}
    text = json.dumps(fixture, ensure_ascii=False, indent=1)
    for said, instead in PRIVATE:
        text = re.sub(said, instead, text)
    (TRANSCRIPTS / name).write_text(text + "\n", encoding="utf-8")


def read_fixture(name: str) -> dict[str, Any]:
    out: dict[str, Any] = json.loads((TRANSCRIPTS / name).read_text(encoding="utf-8"))
    return out
