"""What the server's tests share: `serve` starts a server around a source and stops it after the test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from live_server import PATIENCE, Live
from scripted import ScriptedSource

from halfbyte.model.tokenizer import Tokenizer
from halfbyte.server.settings import ServerSettings

if TYPE_CHECKING:
    from page_driver import Page


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


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for a name by which no test reaches the server, signed by nobody else, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=box"
    names = ["-addext", "subjectAltName=DNS:box.example,IP:127.0.0.1"]
    made = [*words.split(), *names, "-keyout", str(key), "-out", str(file)]
    subprocess.run(made, check=True, capture_output=True)
    return file, key


# ---- the chat page ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")  # while it lives, no coroutine of another file could run in this thread
def browser() -> Iterator[Any]:
    import page_driver

    with page_driver.playwright.sync_playwright() as p:
        chrome = p.chromium.launch(executable_path=page_driver.CHROMIUM, args=page_driver.FLAGS)
        yield chrome
        chrome.close()


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    """The server behind the page."""
    import page_driver

    return serve(page_driver.talkative())


@pytest.fixture
def open_page(browser: Any, live: Live) -> Iterator[Callable[..., Page]]:
    import page_driver

    pages: list[Page] = []

    def start(**context: Any) -> Page:
        pages.append(page_driver.Page(browser, live, **context))
        return pages[-1]

    yield start
    for page in pages:
        page.close()
