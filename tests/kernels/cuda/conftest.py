"""Tests of the CUDA kernels: in the emulator everywhere, on a GPU where there is one.

With HALFBYTE_GPU_INSTRUCTIONS=sm80 in the environment all of them run with SM80's instructions alone, in the emulator
and on a GPU; what cannot (products of a warpgroup, block-scaled ones) is skipped.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from halfbyte.errors import PlanError, UsageError
from halfbyte.kernels.cuda.device.host import NEWER
from halfbyte.plan.machine import instruction_set
from tests.kernels.cuda.emulator import emulator_available


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Where the emulator has no compiler, what needs it is skipped; the rest runs. So is what an older instruction set
    that the tests are restricted to lacks."""
    try:
        return (yield)
    except PlanError as e:
        if instruction_set() is not None and NEWER in str(e):
            pytest.skip(str(e))
        raise
    except UsageError:
        if reason := emulator_available():
            pytest.skip(reason)
        raise
