"""What lets `pytest -m gpu tests` run on a machine that has a GPU and little else.

Only files with GPU tests are collected then, so that the packages of the others (HTTP clients, peers, hypothesis) need
not be there; a GPU file that does need a missing package is left out, and the summary says so.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

NOT_EVERYWHERE = {"anthropic", "gguf", "hypothesis", "httpx", "ml_dtypes", "msgspec", "openai", "transformers"}
_left_out: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_asyncio") is None:
        parser.addini("asyncio_mode", "of pytest-asyncio, which is not installed here: tests that need it cannot run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if (
        config.option.markexpr != "gpu"
        or collection_path.suffix != ".py"
        or not collection_path.name.startswith("test_")
    ):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if "mark.gpu" not in text:
        return True
    missing = _missing(text)
    if missing is not None:
        _left_out[collection_path.name] = missing
        return True
    return None


def _missing(text: str) -> str | None:
    """A package that a file imports when it is loaded, and that is not installed."""
    for node in ast.parse(text).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for top in (name.split(".")[0] for name in names):
            if top in NOT_EVERYWHERE and importlib.util.find_spec(top) is None:
                return top
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, package in _left_out.items():
        terminalreporter.write_line(f"not run: {name}, which needs {package}")
