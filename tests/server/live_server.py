"""A real server on a free local port, in a thread of its own, around any token source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import uvicorn
from recorder import Recorder

from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.app import create_app
from halfbyte.server.http.doorkeeper import Doorkeeper
from halfbyte.server.run import bind, config_for
from halfbyte.server.settings import ServerSettings

PATIENCE = 120  # seconds for anything that is going to happen: a busy machine must not decide a test


class Live:
    """A running server. `url` has no trailing slash. `recorder` notes what it is asked."""

    def __init__(self, source: Any, settings: ServerSettings, tokenizer: Tokenizer | None = None) -> None:
        self.source = source
        self.clients: list[openai.OpenAI | anthropic.Anthropic | httpx.Client] = []
        self.app = create_app(source, tokenizer or source.tokenizer, settings)
        self.service = self.app.state.service
        self.recorder = Recorder(self.app)
        config = config_for(self.recorder, settings)
        self.doorkeeper: Doorkeeper = config.http.args[0]  # type: ignore[union-attr]
        self.server = uvicorn.Server(config)
        self.sock = bind(replace(settings, port=0))
        self.thread = threading.Thread(target=self.server.run, args=([self.sock],), daemon=True)
        self.thread.start()
        deadline = time.monotonic() + PATIENCE
        while not self.server.started:
            assert self.thread.is_alive()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        client = anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
