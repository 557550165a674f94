"""Brings tensors from a GPU into host memory: through two page-locked buffers in turns.

A copy straight into ordinary memory is done by one thread of the driver, which also takes the first touch of every
page. Here the copy engine fills a buffer while torch's threads empty the other one, and the pages are touched by all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BUFFER = 64 << 20  # bytes; smaller tensors are copied as they are
BUFFERS = 2


def in_host_memory(tensor: Tensor) -> Tensor:
    """This tensor in host memory, not page-locked; itself where it is there."""
    if tensor.device.type == "cpu":
        return tensor
    if tensor.nbytes <= BUFFER or not tensor.is_contiguous():
        return tensor.cpu()
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_in_pieces(out.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    return out


def copy_in_pieces(target: Tensor, source: Tensor) -> None:
    """uint8 [n] on a GPU into host memory."""
    buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
    events: list[Any] = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
    starts = list(range(0, source.numel(), BUFFER))

    def fetch(number: int) -> None:
        piece = source[starts[number] : starts[number] + BUFFER]
        buffers[number % BUFFERS][: piece.numel()].copy_(piece, non_blocking=True)
        events[number % BUFFERS].record()

    for number in range(min(BUFFERS, len(starts))):
        fetch(number)
    for number, start in enumerate(starts):
        events[number % BUFFERS].synchronize()
        piece = target[start : start + BUFFER]
        piece.copy_(buffers[number % BUFFERS][: piece.numel()])
        if number + BUFFERS < len(starts):
            fetch(number + BUFFERS)
