"""Which architecture plans are made for on the GPU that is here.

It is the GPU's own, unless HALFBYTE_GPU_INSTRUCTIONS names an older one: then kernels, tiles and sizes are that one's,
compiled from its instructions alone, which is how they are tested where no such GPU is (docs/add-an-architecture.md).
"""

from __future__ import annotations

from halfbyte.architectures import OLDER, Arch, arch_with, restricted
from halfbyte.errors import UsageError
from halfbyte.gates import setting

VARIABLE = "HALFBYTE_GPU_INSTRUCTIONS"


def instruction_set() -> Arch | None:
    """The architecture whose instructions kernels are restricted to, or None."""
    name = setting(VARIABLE)
    if name is None:
        return None
    if name not in OLDER:
        raise UsageError(f"{VARIABLE} is {name!r}; use one of {', '.join(OLDER)}, or unset it.")
    return OLDER[name]


def arch_of_gpu(capability: tuple[int, ...]) -> Arch:
    """The architecture to plan for on a GPU with this compute capability."""
    arch, older = arch_with(capability), instruction_set()
    return arch if older in (None, arch) else restricted(older, arch)
