"""Tests of the CUDA kernels: in the emulator everywhere, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.device.emulator import emulator_available


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Where the emulator has no compiler, what needs it is skipped; the rest runs."""
    try:
        return (yield)
    except UsageError:
        if reason := emulator_available():
            pytest.skip(reason)
        raise
