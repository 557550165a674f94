"""Orders of summing for exact tests, and what `pytest -m gpu tests` needs on a machine that is lent for minutes.

Only files with GPU tests are collected then. A failure is printed when it happens: such runs have a time limit, and
ending early must not lose the tracebacks.

Tests marked `exact` (bits or tokens are equal across shapes, batches or threads) run with
products that add up in another order for every shape and for every other row; in the full run with the library's, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


class TellAtOnce:
    """Prints what went wrong before the next test begins."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and told is not None:
            told.write_line("")
            told.write_line(f"{report.nodeid} failed ({report.when}):\n{report.longreprtext}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        config.pluginmanager.register(TellAtOnce(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.option.markexpr != "gpu":
        return None
    if collection_path.is_dir():  # a folder without GPU tests: its conftest may need anything
        return None if any(_has_gpu_tests(p) for p in collection_path.rglob("test_*.py")) else True
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return None if _has_gpu_tests(collection_path) else True


def _has_gpu_tests(path: Path) -> bool:
    return "mark.gpu" in path.read_text(encoding="utf-8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("exact"):
        orders = [pytest.param("library", marks=pytest.mark.slow), "shuffled"]  # the library's is what all others use
        metafunc.parametrize("sum_order", orders, indirect=True)


@pytest.fixture(autouse=True, scope="session")
def _cpu_instructions() -> None:
    """HALFBYTE_CPU_INSTRUCTIONS holds for tests, too, whose gates do not come from the environment."""
    from halfbyte import gates

    asked = gates.parse().cpu_instructions
    if asked != "auto":
        from halfbyte.kernels.cpu import library

        usable = library.usable_sets
        library.usable_sets = lambda name="auto": usable(asked if name == "auto" else name)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def sum_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    order = str(getattr(request, "param", "library"))
    if order == "shuffled":
        from tests import sum_orders

        sum_orders.shuffle(monkeypatch)
    return order


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    asked = [item for item in items if item.get_closest_marker("gpu")]
    if asked:
        import torch

        if not torch.cuda.is_available():
            for item in asked:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):  # figures that are worth a line in the log, and decide nothing
        for name, value in report.user_properties:
            if name == "shown":
                terminalreporter.write_line(str(value))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`halfbyte` as it is typed: its exit code, and what it printed on either stream."""
    from halfbyte.cli import main

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halfbyte", *args])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
