"""Tells an error of one step from a dead device.

An error of a kernel (a trap, an access outside of memory) destroys the process's context on the GPU: from then on every
call fails, and only a new process can use the GPU again. The first error of a step is the moment to find out.
"""

from __future__ import annotations

import torch

from halfbyte.errors import EngineDiedError
from halfbyte.plan.stopped import stop_reason


def raise_if_dead(device: torch.device, error: BaseException) -> None:
    """Raise EngineDiedError if the device no longer responds; otherwise `error` concerns only its step."""
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
