"""Gates near those that make no plan, the smallest change first, for a message that names one that works.

Nothing here judges: the caller plans with each until one succeeds. Formats change only where a kernel for them is
missing, and the flag says so; a kernel, tile or cache that was asked for by name is given up before two changes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from halfbyte.formats.matrices import Formats
from halfbyte.gates import AXES, LAYER_GROUPS, Gates, Layers
from halfbyte.plan.phase import GROUP

KERNEL_AXES = ("moe_kernel", "linear_kernel", "attention")
VALUE_AXES = ("activation", "kv_dtype", "tile", "speculate", "cpu_instructions")
FLAGS = {axis.field: axis.flag for axis in AXES}

Change = tuple[str, dict[str, object]]  # flag as it is typed, fields of Gates


def alternatives(gates: Gates, stored: Mapping[str, str]) -> Iterator[tuple[str, Gates]]:
    """(flags to use, gates with them), one change at a time, then two, then all that was asked for by name given up."""
    changes = [*_formats(gates, stored), *_defaults(gates)]
    for count in (1, 2):
        for some in combinations(changes, count):
            fields = {name: value for _, change in some for name, value in change.items()}
            if len(fields) == sum(len(change) for _, change in some):  # two changes of one axis are none
                yield " ".join(flag for flag, _ in some), replace(gates, **fields)  # type: ignore[arg-type]
    kernels = [flag for flag, change in changes if next(iter(change)) in KERNEL_AXES]
    if len(kernels) > 2:
        yield " ".join(kernels), replace(gates, **{name: getattr(Gates(), name) for name in KERNEL_AXES})


def _formats(gates: Gates, stored: Mapping[str, str]) -> Iterator[Change]:
    """No layer apart from its group; experts in MXFP4, dense layers in q8, both, dense layers as the file has them, and
    every layer in MXFP4: what kernels exist for everywhere."""
    if gates.layers.exceptions:
        layers = gates.layers._replace(exceptions=())
        yield f"--layers {layers}", {"layers": layers}
    odd = [role for role in GROUP if role in stored and not {"bf16", "q8", "mxfp4"} >= set(Formats(stored).kinds(role))]
    dense = [group for group in LAYER_GROUPS[1:] if group in odd] or list(LAYER_GROUPS[1:])
    targets: list[dict[str, str]] = [{"moe": "mxfp4"}, dict.fromkeys(dense, "q8")]
    targets += [targets[0] | targets[1]]
    every = [*(gates.layers._replace(**target, exceptions=()) for target in targets), Layers()]
    for layers in [*every, Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4")]:
        if layers != gates.layers:
            yield f"--layers {layers}", {"layers": layers}


def _defaults(gates: Gates) -> Iterator[Change]:
    """Each axis that was set, as it is when nothing is said."""
    default = Gates()
    for name in (*KERNEL_AXES, *VALUE_AXES):
        if getattr(gates, name) != getattr(default, name):
            yield f"{FLAGS[name]} {getattr(default, name)}", {name: getattr(default, name)}
    if gates.deterministic == "on":
        yield "it without --deterministic", {"deterministic": "off"}
