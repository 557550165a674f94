"""Numerics of the Triton phases in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels/triton`.

The interpreter must be chosen before Triton is imported, and it then holds for the whole process, so these files are
collected only where it was; `tests/kernels/test_interpreted.py` runs them in a process of their own. Who names them
without it is told so.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    if not INTERPRETED and any(path.is_relative_to(FOLDER) for path in named):
        raise pytest.UsageError(
            "tests/kernels/triton runs in Triton's interpreter only: say TRITON_INTERPRET=1 pytest with these names, "
            "or pytest tests/kernels/test_interpreted.py for all of them."
        )


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds the worst there is: NaN, or all bits set. What a kernel does not write, a test will see."""
    import torch

    empty = torch.empty

    def poisoned(*args: object, **options: object) -> object:
        out = empty(*args, **options)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-1 if out.dtype.is_signed else 255)

    monkeypatch.setattr(torch, "empty", poisoned)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """numpy warns where a GPU goes on: infinities and NaN are values here, and tests say which are allowed."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
