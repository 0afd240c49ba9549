"""A CUDA driver of a few dozen calls in host memory: enough to run the engine's CUDA code without a GPU.

Streams execute at once, captures become graphs, and graphs run when launched; the only kernel it knows is `scale`.
Handles, enums and parameter structures are cuda-bindings' own, so wrong types and counts are found here. Time,
concurrency and the driver's own rules need a GPU: test_gpu_engine.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from paellapy.instrument.records import DESCRIPTOR, LEFT_HEAD_BYTES

_ids = itertools.count(1000)
_OK = real.CUresult.CUDA_SUCCESS
_TYPES = real.CUgraphNodeType
_BLOCK = 128  # of `scale`, as the tests launch it


class Node:
    def __init__(self, kind: str, **facts: Any) -> None:
        self.id, self.kind, self.after = next(_ids), kind, []
        self.facts = facts


class Graph:
    def __init__(self) -> None:
        self.id, self.nodes, self.clones = next(_ids), {}, {}


class Stream:
    def __init__(self) -> None:
        self.capturing: Graph | None = None
        self.last: list[int] = []


class FakeCuda:
    """`driver()` and `library()` in one. `fails` is the result of graph launches; launches that are `silent` never
    complete.

    `by_kernel`: nodes name a CUkernel, as after a launch by the runtime. `partitions` are green contexts, as lists of
    the groups of SMs in each; `confined` counts the kernels that ran in each context; `partition_streams` maps each of
    their streams to its context. `at_home` counts graphs that ended in the partition of their stream; `ended_inside`
    counts, by number of nodes, graphs that ended in any partition; `launched` lists every launched graph. After `sends`
    kernels, none can be sent to a partition. `groups_only`: SMs outside a group are not accepted into a partition.
    """

    def __init__(self) -> None:
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, list[Node]] = {}
        self.functions: dict[int, str] = {}
        self.events: dict[int, int] = {}
        self.streams: dict[int, Stream] = {}
        self.fails, self.silent, self.by_kernel, self.groups_only = 0, False, False, False
        self.sent, self.sends = 0, math.inf
        self.lost = 0  # the status that launches and waits return since a block failed
        self.partitions: dict[int, list[int]] = {}
        self.confined: Counter[int] = Counter()
        self.partition_streams: dict[int, int] = {}
        self.at_home = 0
        self.ended_inside: Counter[int] = Counter()
        self.launched: set[int] = set()
        self.made: set[int] = set()  # streams
        self.on_block: Callable[[int], object] = lambda number: None  # before a block looks at its flag
        self._memory: list[Any] = []
        self._contexts = threading.local()
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)
        self.library_graph_launch = prototype(self._library_graph_launch)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)  # enums and structures

    def _stream(self, handle: Any) -> Stream:
        return self.streams.setdefault(int(handle or 0), Stream())

    def _do(self, stream: Any, kind: str, **facts: Any) -> tuple[Any]:
        node, where = Node(kind, **facts), self._stream(stream)
        if where.capturing is None:
            self._run(node)
        else:
            node.after, where.last = list(where.last), [node.id]
            where.capturing.nodes[node.id] = node
        return (_OK,)

    def _run(self, node: Node) -> None:
        f = node.facts
        if node.kind == "copy":
            ctypes.memmove(f["target"], f["source"], f["nbytes"])
        elif node.kind == "word":
            ctypes.c_uint64.from_address(f["address"]).value = 1
        elif node.kind == "event":
            self.events[f["event"]] = time.perf_counter_ns()
        elif self.functions.get(f["function"]) == "scale":
            self.confined[f.get("context", 0)] += 1
            for first, count in self._runs(f["parameters"], f["grid"][0]):
                _scale(f["parameters"], first, count)
        elif self.functions.get(f["function"]) == "probe":
            (address,) = struct.unpack("<Q", f["parameters"])
            ctypes.c_uint64.from_address(address).value = time.perf_counter_ns()
            ctypes.c_uint32.from_address(address + 8).value = 132

    def _runs(self, parameters: bytes, blocks: int) -> list[tuple[int, int]]:
        """The blocks that run, as (first, count). If there is a flag, each block reads it."""
        descriptor = _descriptor(parameters)
        if descriptor is None or not descriptor["flag"]:
            return [(int(descriptor["first"]) if descriptor is not None else 0, blocks)]
        flag, left = (ctypes.c_uint32.from_address(int(descriptor[name])) for name in ("flag", "left"))
        ran = []
        for k in range(blocks):
            number = int(descriptor["first"]) + k
            if descriptor["todo"]:
                number = ctypes.c_uint32.from_address(int(descriptor["todo"]) + 4 * k).value
            self.on_block(number)
            if flag.value < descriptor["epoch"]:
                ran.append((number, 1))
                continue
            ctypes.c_uint32.from_address(int(descriptor["left"]) + LEFT_HEAD_BYTES + 4 * left.value).value = number
            left.value += 1
        return ran

    def _library_graph_launch(self, executable: int, stream: int) -> int:
        known = stream in self.made
        return self._graph_launch(executable, stream) if known else int(real.CUresult.CUDA_ERROR_INVALID_HANDLE)

    def _graph_launch(self, executable: int, stream: int) -> int:
        if not self.fails and not self.silent:
            self.launched.add(executable)
            ends = [node.facts.get("context", 0) for node in self.executables[executable] if node.kind == "word"]
            self.at_home += ends == [self.partition_streams.get(stream)]
            self.ended_inside[len(self.executables[executable])] += ends != [0]
            for node in self.executables[executable]:
                self._run(node)
        return self.fails

    def _find(self, handle: Any) -> tuple[Node, Graph]:
        return next((g.nodes[int(handle)], g) for g in self.graphs.values() if int(handle) in g.nodes)

    # -- what the launch path calls through ctypes

    def launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        fields = (ctypes.c_void_p * 5).from_address(extra)
        parameters = ctypes.string_at(fields[1], ctypes.c_size_t.from_address(fields[3]).value)
        facts = {"grid": (gx, gy, gz), "block": (bx, by, bz), "shared": shared, "parameters": parameters}
        if not self.lost:
            self._do(stream, "kernel", function=function, **facts)
        return self.lost

    def is_capturing(self, stream, status):
        status._obj.value = int(self._stream(stream).capturing is not None)
        return 0

    # -- device, memory, modules

    def cuDeviceGetCount(self):
        return _OK, 1

    def cuDeviceGet(self, index):
        return _OK, 0

    def cuDeviceGetName(self, length, device):
        return _OK, b"Fake GPU\0"

    def cuDeviceGetAttribute(self, which, device):
        return _OK, 9 if "MAJOR" in which.name else 0 if "MINOR" in which.name else 132

    def cuDevicePrimaryCtxRetain(self, device):
        return _OK, real.CUcontext(1)

    def cuCtxGetCurrent(self):
        return _OK, real.CUcontext(1)

    def cuCtxSetCurrent(self, context):
        self._contexts.stack = [context]
        return (_OK,)

    def cuCtxPushCurrent(self, context):
        self._contexts.stack = [*getattr(self._contexts, "stack", []), context]
        return (_OK,)

    def cuCtxPopCurrent(self):
        return _OK, self._contexts.stack.pop()

    def cuCtxSynchronize(self):
        return (real.CUresult(self.lost),)

    def cuCtxGetStreamPriorityRange(self):
        return _OK, 0, -5

    def cuDriverGetVersion(self):
        return _OK, 13000

    def cuMemGetInfo(self):
        return _OK, 1 << 33, 1 << 34

    def _allocate(self, nbytes):
        buffer = ctypes.create_string_buffer(nbytes + 256)
        self._memory.append(buffer)
        address = ctypes.addressof(buffer)
        return _OK, address + -address % 256

    def cuMemAlloc(self, nbytes):
        return self._allocate(nbytes)

    def cuMemHostAlloc(self, nbytes, flags):
        return self._allocate(nbytes)

    def cuMemFree(self, address):
        return (_OK if getattr(self._contexts, "stack", None) else real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    def cuMemFreeHost(self, address):
        return (_OK,)

    def cuMemsetD8(self, address, value, nbytes):
        ctypes.memset(int(address), value, nbytes)
        return (_OK,)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        return self.cuMemsetD8(address, value, nbytes)

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        return self._do(stream, "copy", target=int(target), source=int(source), nbytes=nbytes, inward=True)

    def cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        return self._do(stream, "copy", target=int(target), source=int(source), nbytes=nbytes, inward=False)

    def cuMemcpy2D(self, copy):
        return (_OK,)

    def cuModuleLoadData(self, image):
        return _OK, real.CUmodule(next(_ids))

    def cuModuleGetFunction(self, module, name):
        handle = next(_ids)
        self.functions[handle] = name.decode()
        return _OK, real.CUfunction(handle)

    def cuFuncGetAttribute(self, which, function):
        return _OK, 32 if "REGS" in which.name else 0

    def cuFuncSetAttribute(self, function, which, value):
        return (_OK,)

    def cuFuncGetName(self, function):
        return _OK, self.functions[int(function)].encode()

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        facts = {"grid": (gx, gy, gz), "block": (bx, by, bz), "shared": shared}
        return self._do(stream, "kernel", function=int(function), parameters=struct.pack("<Q", params[0][0]), **facts)

    def cuGetErrorString(self, code):
        return _OK, b"a fault"

    # -- streams and events

    def cuStreamCreateWithPriority(self, flags, priority):
        handle = next(_ids)
        self.made.add(handle)
        return _OK, real.CUstream(handle)

    def cuStreamDestroy(self, stream):
        self.partition_streams.pop(int(stream), None)
        self.made.discard(int(stream))
        return (_OK,)

    def cuStreamSynchronize(self, stream):
        return (real.CUresult(self.lost),)

    def cuStreamQuery(self, stream):
        return (real.CUresult(700 if self.silent else 0),)

    def cuStreamWaitValue64(self, stream, address, value, flags):
        return (_OK,)

    def cuStreamWriteValue32(self, stream, address, value, flags):
        ctypes.c_uint32.from_address(int(address)).value = value
        return (_OK,)

    def library_batch(self, stream, count, at, flags):
        """cuStreamBatchMemOp of `library()`: operations are read from memory, as the driver does."""
        size = 8 * len(real.CUstreamBatchMemOpParams().pad)
        for k in range(count):
            each = real.CUstreamBatchMemOpParams()
            ctypes.memmove(int(each.getPtr()), at + k * size, size)
            assert each.operation == real.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
            ctypes.c_uint32.from_address(int(each.writeValue.address)).value = int(each.writeValue.value)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return _OK, mode

    def cuStreamBeginCapture(self, stream, mode):
        where = self._stream(stream)
        assert where.capturing is None
        where.capturing, where.last = Graph(), []
        return (_OK,)

    def cuStreamEndCapture(self, stream):
        where = self._stream(stream)
        graph, where.capturing = where.capturing, None
        self.graphs[graph.id] = graph
        return _OK, real.CUgraph(graph.id)

    def cuStreamGetCaptureInfo(self, stream):
        where = self._stream(stream)
        last = [real.CUgraphNode(i) for i in where.last]
        active = real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return _OK, active, 1, real.CUgraph(where.capturing.id), last, [], len(last)

    def cuEventCreate(self, flags):
        handle = next(_ids)
        self.events[handle] = 0
        return _OK, real.CUevent(handle)

    def cuEventRecord(self, event, stream):
        self.events[int(event)] = time.perf_counter_ns()
        return (_OK,)

    def cuEventQuery(self, event):
        return (real.CUresult(self.lost),)

    def cuEventSynchronize(self, event):
        return (real.CUresult(self.lost),)

    def cuEventElapsedTime(self, start, end):
        return _OK, max(1e-4, (self.events[int(end)] - self.events[int(start)]) * 1e-6)

    def cuEventDestroy(self, event):
        del self.events[int(event)]
        return (_OK,)

    # -- graphs

    def cuGraphGetNodes(self, graph, count=0):
        nodes = [real.CUgraphNode(i) for i in self.graphs[int(graph)].nodes]
        return _OK, nodes[:count], len(nodes)

    def library_nodes(self, graph, found, count):
        """cuGraphGetNodes of `library()`: handles are written to memory."""
        _, nodes, _ = self.cuGraphGetNodes(graph, count._obj.value)
        found[: len(nodes)] = [int(node) for node in nodes]
        count._obj.value = len(nodes)
        return 0

    def cuGraphGetEdges(self, graph, count=0):
        edges = [(a, node.id) for node in self.graphs[int(graph)].nodes.values() for a in node.after]
        before, after = ([real.CUgraphNode(e[k]) for e in edges[:count]] for k in range(2))
        return _OK, before, after, [real.CUgraphEdgeData()] * count, len(edges)

    def cuGraphNodeGetType(self, node):
        kernel = self._find(node)[0].kind == "kernel"
        return _OK, _TYPES.CU_GRAPH_NODE_TYPE_KERNEL if kernel else _TYPES.CU_GRAPH_NODE_TYPE_MEMCPY

    def cuGraphKernelNodeGetParams(self, node):
        facts, params = self._find(node)[0].facts, real.CUDA_KERNEL_NODE_PARAMS()
        params.func, params.sharedMemBytes = real.CUfunction(facts["function"]), facts["shared"]
        if self.by_kernel and "context" not in facts:  # one that was sent elsewhere may not say of which kernel it is
            params.func, params.kern = real.CUfunction(0), real.CUkernel(facts["function"])
        params.gridDimX, params.gridDimY, params.gridDimZ = facts["grid"]
        params.blockDimX, params.blockDimY, params.blockDimZ = facts["block"]
        return _OK, params

    def cuGraphKernelNodeSetParams(self, node, params):
        facts = self._find(node)[0].facts
        self.sent += 1
        if self.sent > self.sends:
            return (real.CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert int(params.func) == 0  # else it would stay where it is
        assert int(params.kern) == facts["function"]
        facts["context"] = int(params.ctx)
        return (_OK,)

    def cuKernelGetFunction(self, kernel):
        return _OK, real.CUfunction(int(kernel))

    # -- green contexts

    def cuDeviceGetDevResource(self, device, kind):
        return _OK, real.CUdevResource()

    def cuDevSmResourceSplitByCount(self, groups, resource, flags, least):
        """As on an H200: one group fewer than possible, and the remaining SMs beside the groups."""
        made = [real.CUdevResource() for _ in range(groups)]
        rest = real.CUdevResource()
        for each, sms in (*((each, least) for each in made[:-1]), (rest, least + 4)):
            each.type = real.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            each.sm.smCount = sms
        self._groups = {id(each): k for k, each in enumerate((*made[:-1], rest))}
        self._keep_groups = (made, rest)
        return _OK, made, groups - 1, rest

    def cuDevResourceGenerateDesc(self, resources, count):
        numbers = [self._groups[id(each)] for each in resources]
        assert len(set(numbers)) == count == len(resources)
        if self.groups_only and len(self._groups) - 1 in numbers:
            return real.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None
        self._described = numbers
        return _OK, real.CUdevResourceDesc(next(_ids))

    def cuGreenCtxCreate(self, description, device, flags):
        handle = next(_ids)
        self.partitions[handle] = self._described
        return _OK, real.CUgreenCtx(handle)

    def cuCtxFromGreenCtx(self, context):
        return _OK, real.CUcontext(int(context))

    def cuGreenCtxDestroy(self, context):
        assert int(context) not in self.partition_streams.values(), "streams go first"
        del self.partitions[int(context)]
        return (_OK,)

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        made = self.cuStreamCreateWithPriority(flags, priority)
        self.partition_streams[int(made[1])] = int(context)
        return made

    def cuGraphMemcpyNodeGetParams(self, node):
        facts, copy = self._find(node)[0].facts, real.CUDA_MEMCPY3D()
        copy.WidthInBytes, copy.Height, copy.Depth = facts["nbytes"], 1, 1
        ends = [real.CUmemorytype.CU_MEMORYTYPE_HOST, real.CUmemorytype.CU_MEMORYTYPE_DEVICE]
        copy.srcMemoryType, copy.dstMemoryType = ends if facts["inward"] else ends[::-1]
        return _OK, copy

    def cuGraphCreate(self, flags):
        graph = Graph()
        self.graphs[graph.id] = graph
        return _OK, real.CUgraph(graph.id)

    def cuGraphAddMemcpyNode(self, graph, dependencies, count, copy, context):
        inward = copy.srcMemoryType == real.CUmemorytype.CU_MEMORYTYPE_HOST
        source, target = (copy.srcHost, copy.dstDevice) if inward else (copy.srcDevice, copy.dstHost)
        facts = {"source": int(source), "target": int(target), "nbytes": int(copy.WidthInBytes), "inward": inward}
        return self._add(graph, dependencies, count, Node("copy", **facts))

    def cuGraphClone(self, graph):
        clone = Graph()
        for node in self.graphs[int(graph)].nodes.values():
            copy = Node(node.kind, **node.facts)
            clone.clones[node.id], clone.nodes[copy.id] = copy.id, copy
            copy.after = list(node.after)
        for copy in clone.nodes.values():
            copy.after = [clone.clones[i] for i in copy.after]
        self.graphs[clone.id] = clone
        return _OK, real.CUgraph(clone.id)

    def cuGraphNodeFindInClone(self, node, clone):
        return _OK, real.CUgraphNode(self.graphs[int(clone)].clones[int(node)])

    def cuGraphDestroyNode(self, handle):
        node, graph = self._find(handle)
        del graph.nodes[node.id]
        for other in graph.nodes.values():
            other.after = [i for i in other.after if i != node.id]
        return (_OK,)

    def _add(self, graph, dependencies, count, node):
        assert len(dependencies) == count
        assert all(isinstance(each, real.CUgraphNode) for each in dependencies)
        node.after = [int(each) for each in dependencies]
        self.graphs[int(graph)].nodes[node.id] = node
        return _OK, real.CUgraphNode(node.id)

    def cuGraphAddBatchMemOpNode(self, graph, dependencies, count, params):
        (operation,) = params.paramArray
        return self._add(graph, dependencies, count, Node("word", address=int(operation.writeValue.address)))

    def cuGraphBatchMemOpNodeSetParams(self, handle, params):
        node, (operation,) = self._find(handle)[0], params.paramArray
        assert node.facts["address"] == int(operation.writeValue.address)
        node.facts["context"] = int(params.ctx)
        return (_OK,)

    def cuGraphAddEventRecordNode(self, graph, dependencies, count, event):
        return self._add(graph, dependencies, count, Node("event", event=int(event)))

    def cuGraphAddDependencies(self, graph, before, after, edge_data, count):
        """cuGraphAddDependencies(hGraph, from_, to, edgeData, numDependencies)"""
        for a, b in zip(before, after, strict=True):
            self.graphs[int(graph)].nodes[int(b)].after.append(int(a))
        return (_OK,)

    def cuGraphInstantiate(self, graph, flags):
        left, order = dict(self.graphs[int(graph)].nodes), []
        while left:
            ready = [node for node in left.values() if not any(i in left for i in node.after)]
            assert ready, "a cycle"
            order += ready
            for node in ready:
                del left[node.id]
        handle = next(_ids)
        self.executables[handle] = [Node(node.kind, **node.facts) for node in order]
        return _OK, real.CUgraphExec(handle)

    def cuGraphLaunch(self, executable, stream):
        return (real.CUresult(self._graph_launch(int(executable), 0)),)

    def cuGraphExecDestroy(self, executable):
        del self.executables[int(executable)]
        return (_OK,)

    def cuGraphDestroy(self, graph):
        del self.graphs[int(graph)]
        return (_OK,)


class _Library:
    def __init__(self, fake: FakeCuda) -> None:
        self.cuLaunchKernel, self.cuStreamIsCapturing = fake.launch, fake.is_capturing
        self.cuGraphLaunch = fake.library_graph_launch
        self.cuGraphGetNodes = fake.library_nodes
        self.cuGraphDestroyNode = lambda node: int(fake.cuGraphDestroyNode(node)[0])
        self.cuStreamBatchMemOp_v2 = functools.partial(fake.library_batch)  # can have a prototype


def _descriptor(parameters: bytes) -> Any:
    """The descriptor that `scale` gets besides its own parameters, if any: in place of the two that Triton adds."""
    own = struct.calcsize("<QQfi")
    return np.frombuffer(parameters, DESCRIPTOR, 1, own)[0] if len(parameters) > own + 2 * 8 else None


def _scale(parameters: bytes, first: int, blocks: int) -> None:
    x, out, factor, n = struct.unpack_from("<QQfi", parameters)
    descriptor = _descriptor(parameters)
    if descriptor is not None and descriptor["notify"]:
        ctypes.c_uint64.from_address(int(descriptor["notify"])).value = 1
    low, high = first * _BLOCK, min(n, (first + blocks) * _BLOCK)
    if high > low:
        source, target = (np.ctypeslib.as_array((ctypes.c_float * high).from_address(a)) for a in (x, out))
        target[low:high] = source[low:high] * np.float32(factor)


def install() -> FakeCuda:
    """Puts the fake in the driver's place, for the rest of the process."""
    from paellapy.instrument.device import cuda, cuda_launch, cuda_preempt
    from paellapy.instrument.device import driver as driver_module

    fake = FakeCuda()
    library = _Library(fake)
    for module in (driver_module, cuda, cuda_launch, cuda_preempt):
        module.driver = lambda: fake
        if hasattr(module, "library"):
            module.library = lambda: library
    return fake
