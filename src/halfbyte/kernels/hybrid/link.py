"""The link between a GPU and the host's memory: page-locked memory, copies, and calls that a stream makes on the host.

Everything is put on torch's current stream and waits for nothing, so that a step can be captured in a CUDA graph; only
`fetch` uses a stream of its own. The address of a call belongs to a native function with CUDA's signature for host
functions: no interpreter takes part.

Pages are locked as long as a link lives that asked for it: memory that was freed with its pages locked would be taken
for locked when somebody else gets its address, and the copy engine would read the pages of before.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.errors import EngineError
from halfbyte.kernels.launch import _driver, _ok

SLOTS = 2  # buffers that `fetch` fills in turn
OWN_PAGES = 64 << 20  # bytes from which the C library gives memory pages of its own, which can be locked alone


class Link(Protocol):
    def page_locked(self, count: int) -> Tensor:
        """float32 [count] in host memory that the GPU copies from and to by itself."""

    def lock(self, memory: Tensor) -> None:
        """Lock the pages of host memory that exists, for as long as this link lives, which keeps the memory alive.
        Memory that shares pages with other is left as it is; the driver copies from there through a buffer."""

    def copy(self, target: Tensor, source: Tensor, count: int) -> None:
        """Copy the first `count` words of 4 bytes, when the stream comes to it."""

    def call(self, function: int, argument: ctypes.Structure) -> None:
        """Call a native function, when the stream comes to it. The argument must stay where it is."""

    def fetch(self, slot: int, target: Tensor, source: Tensor) -> None:
        """Copy locked host memory to the GPU once the slot was released, ahead of the stream."""

    def arrive(self, slot: int) -> None:
        """Let the stream wait for the slot's last `fetch`."""

    def release(self, slot: int) -> None:
        """Let the slot be filled again once the stream has come to this point."""

    def seconds(self, work: Callable[[], None]) -> float:
        """The time that work takes on the stream, which this waits for."""


class CudaLink:
    """The link of one GPU, through the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver_api = device, _driver()
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.cuLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        # Of high priority: those are never the stream on which a graph is captured (see `engine/graphs.py`).
        self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._ready: list[Any] = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._free: list[Any] = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._locked: list[Tensor] = []
        self.locking_s = 0.0  # seconds that locking pages has taken
        weakref.finalize(self, _unlock_all, self._driver_api, self._locked).atexit = False  # the driver does it there

    def page_locked(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float32, pin_memory=True)

    def lock(self, memory: Tensor) -> None:
        if memory.nbytes < OWN_PAGES:
            return
        api, address, began = self._driver_api, memory.data_ptr(), time.perf_counter()
        with _locks:
            if not _holders.get(address):
                flags = api.CU_MEMHOSTREGISTER_PORTABLE
                _ok(api.cuMemHostRegister(address, memory.nbytes, flags), "lock the experts' memory")
            _holders[address] = _holders.get(address, 0) + 1
        self._locked.append(memory)
        self.locking_s += time.perf_counter() - began

    def copy(self, target: Tensor, source: Tensor, count: int) -> None:
        api = self._driver_api
        stream = api.CUstream(self._current().cuda_stream)
        _ok(api.cuMemcpyAsync(target.data_ptr(), source.data_ptr(), 4 * count, stream), "copy rows")

    def call(self, function: int, argument: ctypes.Structure) -> None:
        # Not through cuda-bindings: its wrapper takes the interpreter's lock, and frees what a graph calls again.
        status = self._library.cuLaunchHostFunc(self._current().cuda_stream, function, ctypes.addressof(argument))
        if status:
            raise EngineError(f"the GPU's stream cannot call the CPU kernels: CUDA error {status}.")

    def fetch(self, slot: int, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._free[slot])
            target.copy_(source, non_blocking=True)
            self._ready[slot].record(self._side)

    def arrive(self, slot: int) -> None:
        self._current().wait_event(self._ready[slot])

    def release(self, slot: int) -> None:
        self._free[slot].record(self._current())

    def seconds(self, work: Callable[[], None]) -> float:
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)


_locks = threading.Lock()
_holders: dict[int, int] = {}  # address of locked memory -> the number of locks on it


def _unlock_all(api: Any, locked: list[Tensor]) -> None:
    with _locks:
        for memory in locked:
            address = memory.data_ptr()
            _holders[address] -= 1
            if not _holders[address]:
                del _holders[address]
                api.cuMemHostUnregister(address)
    locked.clear()


def link_of(device: torch.device) -> Link:
    return CudaLink(device)
