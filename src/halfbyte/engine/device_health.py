"""Whether a device can still be used after an error of a step.

An error of a kernel (a trap, an access outside of memory) ends the process's context on the GPU: from then on every
call fails, and only a new process has a GPU again. That is told from an error of one step here, at the first one.
"""

from __future__ import annotations

import torch

from halfbyte.errors import EngineDiedError
from halfbyte.plan.stopped import stop_reason


def raise_if_dead(device: torch.device, error: BaseException) -> None:
    """EngineDiedError where the device answers no more; else nothing, and `error` is the step's own."""
    if device.type != "cuda" or isinstance(error, EngineDiedError):
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as dead:  # torch names this error differently from version to version
        line = (str(dead).strip().splitlines() or [type(dead).__name__])[0]
        why = stop_reason()
        raise EngineDiedError(
            f"the GPU failed in a step and this process cannot use it any more ({line}{f'; {why}' if why else ''})."
        ) from error
