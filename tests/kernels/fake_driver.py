"""A CUDA driver that runs nothing: modules are bytes, functions are names, a graph is what was launched into it."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.kernels import launch

OK = (0,)
KERNEL, CHILD, COPY, HOST = 1, 2, 3, 4


class FakeDriver:
    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_KERNEL=KERNEL, CU_GRAPH_NODE_TYPE_GRAPH=CHILD, CU_GRAPH_NODE_TYPE_HOST=HOST
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE=1, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=2
    )

    def __init__(self) -> None:
        self._handles = itertools.count(100)
        self.functions: dict[int, tuple[int, str]] = {}  # function -> module, name
        self.launches: list[int] = []
        self.graph: list[tuple[int, int]] | None = None  # (kind, function) of the graph being captured
        self.graphs: dict[int, list[tuple[int, int]]] = {}
        self.libraries: dict[int, int] = {}  # kernel of a library -> its function

    # ---- modules and launches ---------------------------------------------------------------------------------------

    def cuModuleLoadData(self, address: int) -> tuple[int, int]:
        return 0, next(self._handles)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, int]:
        function = next(self._handles)
        self.functions[function] = module, name.decode()
        return 0, function

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[int]:
        return OK

    def CUstream(self, value: int) -> int:
        return value

    def CUlaunchConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, config: Any, function: int, arguments: int, extra: int) -> tuple[int]:
        if self.graph is None:
            self.launches.append(function)
        else:
            self.graph.append((KERNEL, function))
        return OK

    def foreign(self, name: str) -> int:
        """A function of a module that nobody here loaded."""
        function = next(self._handles)
        self.functions[function] = next(self._handles), name
        return function

    # ---- graphs -----------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, graph: FakeGraph, **_: Any) -> Any:
        self.graph = self.graphs[graph.address] = []
        try:
            yield
        finally:
            self.graph = None

    def CUgraph(self, address: int) -> int:
        return address

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[int, list[tuple[int, int]], int]:
        nodes = self.graphs[graph]
        return 0, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, node: tuple[int, int]) -> tuple[int, int]:
        return 0, node[0]

    def cuGraphChildGraphNodeGetGraph(self, node: tuple[int, int]) -> tuple[int, int]:
        return 0, node[1]

    def cuGraphKernelNodeGetParams(self, node: tuple[int, int]) -> tuple[int, SimpleNamespace]:
        if node[1] in self.libraries:
            return 0, SimpleNamespace(func=0, kern=node[1])
        return 0, SimpleNamespace(func=node[1], kern=0)

    def cuGraphHostNodeGetParams(self, node: tuple[int, int]) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(fn=node[1])

    def cuKernelGetFunction(self, kernel: int) -> tuple[int, int]:
        return 0, self.libraries[kernel]

    def cuFuncGetName(self, function: int) -> tuple[int, bytes]:
        return 0, self.functions[function][1].encode()

    def cuFuncGetModule(self, function: int) -> tuple[int, int]:
        return 0, self.functions[function][0]


class FakeGraph:
    addresses = itertools.count(1)

    def __init__(self, keep_graph: bool = False) -> None:
        assert keep_graph, "its nodes could not be read"
        self.address = next(self.addresses)
        self.ready = False

    def raw_cuda_graph(self) -> int:
        return self.address

    def instantiate(self) -> None:
        self.ready = True

    def replay(self) -> None:
        assert self.ready

    def pool(self) -> int:
        return 0


class Argument(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int)]


@contextmanager
def _nothing(*_: Any, **__: Any) -> Any:
    yield


def install(patch: pytest.MonkeyPatch) -> FakeDriver:
    """Behind `kernels.launch` and torch's streams and graphs."""
    driver = FakeDriver()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    patch.setattr(launch, "_driver", lambda: driver)
    patch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    patch.setattr(torch.cuda, "Stream", lambda *_: stream)
    patch.setattr(torch.cuda, "stream", _nothing)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    patch.setattr(torch.cuda, "graph", driver.capture)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return driver
