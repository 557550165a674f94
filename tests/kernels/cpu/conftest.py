"""The library of each instruction set of this machine."""

from __future__ import annotations

import ctypes

import pytest

from halfbyte.kernels.cpu.library import open_library, usable_sets


@pytest.fixture(scope="session", params=[s.name for s in usable_sets()])
def step_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    calls: ctypes.CDLL = open_library(request.param).calls
    return calls


@pytest.fixture(scope="session")
def step_libraries() -> list[ctypes.CDLL]:
    """All of them, for tests whose reference takes longer than what is tested."""
    return [open_library(s.name).calls for s in usable_sets()]
