"""One library for each instruction set of this machine, built once a session."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels.cpu.native import available, build


@pytest.fixture(scope="session", params=available())
def step_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("step") / f"{request.param}.so", request.param)
