"""What the server's tests share: `serve` starts a server around a source and stops it after the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import httpx
import pytest
from live_server import PATIENCE, Live
from scripted import ScriptedSource

from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.settings import ServerSettings


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.gpt_oss()


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    with contextlib.ExitStack() as stack:

        def start(source: ScriptedSource, settings: ServerSettings | None = None) -> Live:
            quiet = settings or ServerSettings(min_available_bytes=0)
            live = Live(source, quiet)
            stack.callback(live.close)
            return live

        yield start


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=PATIENCE) as client:
        yield client
