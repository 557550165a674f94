"""The gates that ask for the reference on every axis: for tests of what operations mean, and for oracles.

Tests of the engine, the server, speculation and evaluation take the default, which on a CPU are the CPU kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfbyte.gates import Gates, PerRegime

_EVERYWHERE = PerRegime("reference", "reference", "reference")
REFERENCE = Gates(moe_kernel=_EVERYWHERE, linear_kernel=_EVERYWHERE, attention="reference")
# The CPU kernels in their exact form: nothing is rounded that the reference does not round.
EXACT_FORM = Gates(activation="f32", kv_dtype="f32")


def reference(**more: Any) -> Gates:
    """The reference, with further gates."""
    return replace(REFERENCE, **more)
