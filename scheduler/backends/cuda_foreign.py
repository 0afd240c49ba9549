"""A graph that was captured elsewhere, as a program: its clone between the copies of inputs and outputs."""

from __future__ import annotations

from typing import Any

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.backends.cuda_graphs import add_edge, describe, read_graph
from paellapy.scheduler.models.foreign import ForeignGraph
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.program import Program


def foreign_program(device: CudaDevice, lane: Lane, foreign: ForeignGraph) -> Program:
    """The graph with a lane's copies around it, node by node."""
    device.activate()
    cu = driver()
    clone = check(cu.cuGraphClone(cu.CUgraph(foreign.handle)), "cloning a graph")
    try:
        inner = read_graph(clone)
        before = {b for _, b in inner.edges}
        after = {a for a, _ in inner.edges}
        roots = [node for k, node in enumerate(inner.nodes) if k not in before]
        leaves = [node for k, node in enumerate(inner.nodes) if k not in after]
        last: list[Any] = []
        for key, place in foreign.inputs.items():
            last = [_copy(cu, clone, last, place.address, lane.inputs[key].ctypes.data, place.spec.nbytes, True)]
        for root in roots:
            for node in last:
                add_edge(cu, clone, node, root)
        last = leaves
        for key, place in foreign.outputs.items():
            last = [_copy(cu, clone, last, lane.outputs[key].ctypes.data, place.address, place.spec.nbytes, False)]
        whole = read_graph(clone)
        nodes = [describe(device, node, lane.model.name) for node in whole.nodes]
    except BaseException:
        cu.cuGraphDestroy(clone)
        raise
    return Program(lane.model, lane.index, 1, nodes, whole.chain, whole)


def _copy(cu: Any, graph: Any, after: list[Any], target: int, source: int, nbytes: int, to_gpu: bool) -> Any:
    """Adds a copy between the host and the GPU behind some nodes."""
    host, device = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params = cu.CUDA_MEMCPY3D()
    params.srcMemoryType, params.dstMemoryType = (host, device) if to_gpu else (device, host)
    if to_gpu:
        params.srcHost, params.dstDevice = source, cu.CUdeviceptr(target)
    else:
        params.srcDevice, params.dstHost = cu.CUdeviceptr(source), target
    params.WidthInBytes, params.Height, params.Depth = nbytes, 1, 1
    context = check(cu.cuCtxGetCurrent(), "reading the context")
    return check(cu.cuGraphAddMemcpyNode(graph, after, len(after), params, context), "adding a copy")
