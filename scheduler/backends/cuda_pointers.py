"""Pointers in captured graphs: the addresses among a node's arguments, and the weights that they point to."""

from __future__ import annotations

import ctypes
from typing import Any

from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.cuda_graphs import read_graph
from paellapy.scheduler.models.weight_range import WeightRange


def pointers_of(node: Any) -> list[int] | None:
    """Every number among a kernel's arguments that could be an address; None if they cannot be read.

    Kernels of libraries have pointers inside structures, which are searched word by word.
    """
    cu = driver()
    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
    function = params.func
    if not int(function):
        function = check(cu.cuKernelGetFunction(params.kern), "finding a kernel's function")
    where = int(params.kernelParams or 0)
    if not where:
        return _packed(int(params.extra or 0))
    if not hasattr(cu, "cuFuncGetParamInfo"):  # bindings before 12.4
        return None
    found: list[int] = []
    for k in range(4096):
        status, _, size = cu.cuFuncGetParamInfo(function, k)
        if int(status):
            break
        at = ctypes.c_uint64.from_address(where + 8 * k).value
        if not at:
            return None
        words = int(size) // 8
        found += (ctypes.c_uint64 * words).from_address(at)
    return found


def words_of(graph: Any) -> list[int]:
    """The launch arguments of all kernels in a PyTorch graph, as 8-byte numbers."""
    cu = driver()
    kernel = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    nodes = read_graph(cu.CUgraph(graph.raw_cuda_graph())).nodes
    kernels = [each for each in nodes if check(cu.cuGraphNodeGetType(each), "reading a graph's node") == kernel]
    return [word for each in kernels for word in pointers_of(each) or []]


def _packed(extra: int) -> list[int] | None:
    """Arguments in one buffer: a list of names and addresses that ends with 0."""
    buffer = size = 0
    for k in range(0, 8, 2):
        name, value = (ctypes.c_uint64 * 2).from_address(extra + 8 * k) if extra else (0, 0)
        if name == 0:
            break
        if name == 1:  # CU_LAUNCH_PARAM_BUFFER_POINTER
            buffer = value
        elif name == 2:  # CU_LAUNCH_PARAM_BUFFER_SIZE
            size = ctypes.c_uint64.from_address(value).value
    return list((ctypes.c_uint64 * (size // 8)).from_address(buffer)) if buffer else None


def node_ends(nodes: list[Any], weights: WeightRange) -> list[tuple[int, int]]:
    """For each node of a graph: how many bytes, from the start of the weights, it needs, by the pointer that asks for
    the least and by the pointer that asks for the most.
    """
    cu = driver()
    kinds = cu.CUgraphNodeType
    ends = []
    for node in nodes:
        kind = check(cu.cuGraphNodeGetType(node), "reading a graph's node")
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            found = pointers_of(node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = check(cu.cuGraphMemcpyNodeGetParams(node), "reading a copy")
            found = [int(copy.srcDevice), int(copy.dstDevice)]
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            found = [int(check(cu.cuGraphMemsetNodeGetParams(node), "reading a memset").dst)]
        elif kind in (kinds.CU_GRAPH_NODE_TYPE_EMPTY, kinds.CU_GRAPH_NODE_TYPE_BATCH_MEM_OP):
            found = []
        else:
            found = None
        all_of_it = weights.layout.nbytes
        asked = [all_of_it] if found is None else [end for end in map(weights.end_at, found) if end]
        ends.append((min(asked, default=0), max(asked, default=0)))
    return ends
