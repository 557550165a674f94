"""What numbers are inside a step, by the gates: activations, keys and values, the residual stream."""

from __future__ import annotations

from typing import NamedTuple

from halfbyte.gates import Gates
from halfbyte.plan.phase import Arch
from halfbyte.plan.step import REGIMES


class Values(NamedTuple):
    dtype: str  # residual stream and dense activations
    activation: str  # at decode
    activations: dict[str, str]  # regime -> activation, where it is another one
    kv_dtype: str


def values_of(gates: Gates, arch: Arch, *, reference: bool = False) -> Values:
    """`reference`: what `auto` means where the reference runs on a CPU: nothing is rounded."""
    auto, auto_kv = ("bf16", "bf16") if arch.is_gpu else ("f32", "f32") if reference else ("int8", "bf16")
    activations = {r: auto if (a := gates.activation_in(r)) == "auto" else a for r in REGIMES}
    return Values(
        dtype="bf16" if arch.is_gpu else "f32",
        activation=activations["decode"],
        activations={r: a for r, a in activations.items() if a != activations["decode"]},
        kv_dtype=auto_kv if gates.kv_dtype == "auto" else gates.kv_dtype,
    )
