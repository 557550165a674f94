"""Lists the kernels of a captured CUDA graph from the driver: what a replay really runs.

A node names a function, the function belongs to a module, and the hash of that module's binary is known if this process
loaded it (`launch.remember_loaded`). Kernels of other modules are torch's own. Needs cuda-bindings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from halfbyte.kernels.launch import _driver, _ok, host_functions, loaded_functions, loaded_modules
from halfbyte.plan.record import NodeKernel


def kernels(graph: int) -> list[NodeKernel]:
    """`graph`: the address of a CUgraph, as torch gives it (`CUDAGraph.raw_cuda_graph`)."""
    driver = _driver()
    return list(_kernels(driver, driver.CUgraph(graph)))


def _kernels(driver: Any, graph: Any) -> Iterator[NodeKernel]:
    kinds = driver.CUgraphNodeType
    count = _ok(driver.cuGraphGetNodes(graph), "count a graph's nodes")[-1]
    nodes = _ok(driver.cuGraphGetNodes(graph, count), "list a graph's nodes")[0] if count else ()
    for node in nodes:
        kind = _ok(driver.cuGraphNodeGetType(node), "ask for a node's kind")[0]
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            child = _ok(driver.cuGraphChildGraphNodeGetGraph(node), "open a graph inside a graph")[0]
            yield from _kernels(driver, child)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield _kernel(driver, node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
            parameters = _ok(driver.cuGraphHostNodeGetParams(node), "read a host function's node")[0]
            address = int(parameters.fn)
            yield host_functions.get(address, NodeKernel(f"host function at {address:#x}", ""))


def _kernel(driver: Any, node: Any) -> NodeKernel:
    parameters = _ok(driver.cuGraphKernelNodeGetParams(node), "read a kernel's node")[0]
    function = parameters.func
    if not int(function):  # launched as a kernel of a library, which has a function of every context
        function = _ok(driver.cuKernelGetFunction(parameters.kern), "find a kernel's function")[0]
    name = _ok(driver.cuFuncGetName(function), "ask for a kernel's name")[0]
    status, module = driver.cuFuncGetModule(function)
    module_hash = None if int(status) else loaded_modules.get(int(module))
    if module_hash is None:
        module_hash = loaded_functions.get(int(function), "")
    return NodeKernel(name.decode() if isinstance(name, bytes) else str(name), module_hash)
