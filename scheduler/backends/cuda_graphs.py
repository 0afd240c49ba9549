"""CUDA graphs: reading a captured graph, cutting it into segments that end by writing a word, SM partitions.

A segment is a clone of the captured graph without the nodes outside the segment, plus one node that writes the
completion word to pinned memory after all others. The write includes a system-wide fence, so the outputs are visible
with it. Cutting touches every node several times and takes a third of a load that finds its profile stored. So there
nodes are handles, which go to the driver through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import CudaStream, check, driver, fail, library
from paellapy.instrument.errors import LaunchError
from paellapy.scheduler.backends.base import Launches
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.memory import Instance
from paellapy.scheduler.models.program import Node, NodeKind, Program, topological
from paellapy.scheduler.models.weights import Bounds, WeightRange

_SAMPLED = 8  # about this many nodes of a clone are searched for, to check the order in which it lists its nodes


@dataclass(slots=True)
class CapturedGraph:
    """A CUgraph with its nodes in an order that respects every dependency."""

    handle: Any
    nodes: list[Any]  # CUgraphNode, in order
    edges: list[tuple[int, int]]  # as indices into `nodes`
    chain: bool
    owner: Any = None  # the object that owns the CUgraph, if it is not ours

    def destroy(self) -> None:
        if self.handle is not None:
            if self.owner is None:
                driver().cuGraphDestroy(self.handle)
            self.handle = self.owner = None


def read_graph(handle: Any) -> CapturedGraph:
    """The nodes and edges of a captured graph."""
    cu = driver()
    _, count = check(cu.cuGraphGetNodes(handle, 0), "reading a graph")
    nodes = list(check(cu.cuGraphGetNodes(handle, count), "reading a graph")[0]) if count else []
    number = {int(node): i for i, node in enumerate(nodes)}
    # Bindings 12 and 13 differ in whether edge data are among the results; counts come last in both.
    edge_count = check(cu.cuGraphGetEdges(handle, 0), "reading a graph")[-1]
    edges: list[tuple[int, int]] = []
    if edge_count:
        found = check(cu.cuGraphGetEdges(handle, edge_count), "reading a graph")
        edges = [(number[int(a)], number[int(b)]) for a, b in zip(found[0], found[1], strict=True)]
    order, chain = topological(len(nodes), edges)
    place = {old: new for new, old in enumerate(order)}
    return CapturedGraph(handle, [nodes[i] for i in order], [(place[a], place[b]) for a, b in edges], chain)


def describe(device: CudaDevice, node: Any, model: str) -> Node:
    """The kind and the resources of one node; `CaptureError` for a node that cannot be cut."""
    cu = driver()
    types = cu.CUgraphNodeType
    kind = _kind_of(node)
    if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
        return _describe_kernel(device, node)
    if kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
        copy = check(cu.cuGraphMemcpyNodeGetParams(node), "reading a copy")
        nbytes = int(copy.WidthInBytes) * max(1, int(copy.Height)) * max(1, int(copy.Depth))
        return Node(_copy_kind(cu, copy), "copy", nbytes=nbytes)
    if kind == types.CU_GRAPH_NODE_TYPE_MEMSET:
        return Node("memset", "memset")
    if kind in (types.CU_GRAPH_NODE_TYPE_MEM_ALLOC, types.CU_GRAPH_NODE_TYPE_MEM_FREE):
        raise CaptureError(
            f"model {model!r} allocates GPU memory on its stream (cudaMallocAsync) while it is captured; use pp.empty, "
            "or CuPy's arrays, which come from the instance's arena", model=model
        )  # fmt: skip
    return Node("other", kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())


def _describe_kernel(device: CudaDevice, node: Any) -> Node:
    cu = driver()
    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
    function = _function_of(params)
    registers, static = device.function_resources(int(function))
    name = check(cu.cuFuncGetName(function), "naming a kernel")
    return Node(
        "kernel",
        name.decode() if isinstance(name, bytes) else str(name),
        blocks=int(params.gridDimX) * int(params.gridDimY) * int(params.gridDimZ),
        threads=int(params.blockDimX) * int(params.blockDimY) * int(params.blockDimZ),
        registers=registers,
        shared_bytes=static + int(params.sharedMemBytes),
    )


def _kind_of(node: Any) -> Any:
    return check(driver().cuGraphNodeGetType(node), "reading a graph's node")


def is_kernel(node: Any) -> bool:
    return bool(_kind_of(node) == driver().CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


def _function_of(params: Any) -> Any:
    if int(params.func):
        return params.func
    # launched as a CUkernel, as the runtime does
    return check(driver().cuKernelGetFunction(params.kern), "finding a kernel's function")


def _copy_kind(cu: Any, copy: Any) -> NodeKind:
    host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    if copy.srcMemoryType == host:
        return "h2d"
    return "d2h" if copy.dstMemoryType == host else "d2d"


# -- cutting


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """A graph of some nodes of another, and the node at its end that writes 1 to a word."""

    handle: Any
    nodes: list[int]  # handles
    end: Any
    word: int

    def end_in(self, context: Any) -> None:
        """Moves the write of the word to a context: for kernels in another context, the end would be seen later."""
        cu = driver()
        params = _write_word(cu, self.word, context)
        check(cu.cuGraphBatchMemOpNodeSetParams(self.end, params), "moving a completion word")


@contextmanager
def segment_graph(graph: CapturedGraph, first: int, end: int, word: int) -> Iterator[SegmentGraph]:
    """The graph of a segment, which exists while it is instantiated."""
    with _cloned(graph.handle, handles_of(graph)) as (clone, nodes):
        _keep(nodes, first, end)
        yield _ended(clone, nodes, graph, word)


@contextmanager
def ended_graph(graph: CapturedGraph, word: int) -> Iterator[SegmentGraph]:
    """The captured graph itself, without a clone, which ends by writing the word while it is instantiated."""
    made = _ended(graph.handle, handles_of(graph), graph, word)
    try:
        yield made
    finally:
        check(driver().cuGraphDestroyNode(made.end), "removing a completion word")


@contextmanager
def word_graph(word: int) -> Iterator[Any]:
    """A graph that only writes 1 to a word, and exists while it is instantiated."""
    cu = driver()
    handle = check(cu.cuGraphCreate(0), "making a graph")
    try:
        _ended(handle, {}, None, word)
        yield handle
    finally:
        check(cu.cuGraphDestroy(handle), "freeing a graph")


def segment_graphs(
    graph: CapturedGraph, bounds: Sequence[tuple[int, int]], words: Sequence[int]
) -> Iterator[SegmentGraph]:
    """The graphs of all segments of a program in order, each valid until the next is requested.

    A clone is halved until it has one segment left. So every node is found and removed once per halving instead of once
    per segment: a quarter of the calls for 20 segments.
    """
    with _cloned(graph.handle, handles_of(graph)) as (clone, nodes):
        yield from _halved(clone, nodes, graph, list(zip(bounds, words, strict=True)))


def _halved(
    handle: Any,
    nodes: dict[int, int],
    graph: CapturedGraph,
    segments: Sequence[tuple[tuple[int, int], int]],
) -> Iterator[SegmentGraph]:
    """Segments, given as bounds and words, of a graph that may be used up; `nodes` maps places to its nodes."""
    _keep(nodes, segments[0][0][0], segments[-1][0][1])
    if len(segments) == 1:
        yield _ended(handle, nodes, graph, segments[0][1])
        return
    middle = len(segments) // 2
    with _cloned(handle, nodes) as (other, others):
        yield from _halved(other, others, graph, segments[:middle])
    yield from _halved(handle, nodes, graph, segments[middle:])


def handles_of(graph: CapturedGraph) -> dict[int, int]:
    """The handles of a graph's nodes by their places."""
    return {i: int(node) for i, node in enumerate(graph.nodes)}


@contextmanager
def _cloned(handle: Any, nodes: Mapping[int, int]) -> Iterator[tuple[Any, dict[int, int]]]:
    """A clone of a graph, and the clones of its nodes, which are all nodes of the graph."""
    cu = driver()
    clone = check(cu.cuGraphClone(handle), "cloning a graph")
    try:
        yield clone, clones_of(handle, clone, nodes)
    finally:
        check(cu.cuGraphDestroy(clone), "freeing a graph")


def clones_of(handle: Any, clone: Any, nodes: Mapping[int, int]) -> dict[int, int]:
    """The clones of a graph's nodes. Drivers list the nodes of a clone in the order of the original, so two lists
    replace a search per node; where a sample of nodes says otherwise, each node is searched for.
    """
    cu = driver()

    def found(node: int) -> int:
        return int(check(cu.cuGraphNodeFindInClone(cu.CUgraphNode(node), clone), "finding a node"))

    mine, theirs = _listed(handle, len(nodes)), _listed(clone, len(nodes))
    if len(mine) == len(theirs) == len(nodes):
        sample = range(0, len(mine), max(1, len(mine) // _SAMPLED))
        if all(found(mine[k]) == theirs[k] for k in (*sample, *range(len(mine))[-1:])):
            pairs = dict(zip(mine, theirs, strict=True))
            return {i: pairs[node] for i, node in nodes.items()}
    return {i: found(node) for i, node in nodes.items()}


def _listed(graph: Any, count: int) -> list[int]:
    """The nodes of a graph in the driver's order; one more than `count` if it has more."""
    nodes, n = (ctypes.c_uint64 * (count + 1))(), ctypes.c_size_t(count + 1)
    if status := library().cuGraphGetNodes(int(graph), nodes, ctypes.byref(n)):
        fail(status, "reading a graph")
    return nodes[: n.value]


def _keep(nodes: dict[int, int], first: int, end: int) -> None:
    """Removes all nodes of a graph except those from `first` to before `end`."""
    destroy = library().cuGraphDestroyNode
    for i in [i for i in nodes if not first <= i < end]:
        if status := destroy(nodes.pop(i)):
            fail(status, "removing a node")


def _ended(handle: Any, nodes: Mapping[int, int], graph: CapturedGraph | None, word: int) -> SegmentGraph:
    """Adds a node behind all others that writes the word. `nodes` are some of `graph`, by their places in it."""
    cu = driver()
    if graph is not None and graph.chain:
        last = [nodes[max(nodes)]] if nodes else []
    else:
        edges = graph.edges if graph is not None else []
        followed = {a for a, b in edges if a in nodes and b in nodes}
        last = [node for i, node in nodes.items() if i not in followed]
    params = _write_word(cu, word, check(cu.cuCtxGetCurrent(), "reading the context"))
    before = [cu.CUgraphNode(node) for node in last]
    added = check(cu.cuGraphAddBatchMemOpNode(handle, before, len(before), params), "adding a completion word")
    return SegmentGraph(handle, list(nodes.values()), added, word)


def _write_word(cu: Any, address: int, context: Any) -> Any:
    operation = cu.CUstreamBatchMemOpParams()
    operation.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64
    operation.writeValue.address = address
    operation.writeValue.value64 = 1
    operation.writeValue.flags = 0  # default flags: a fence before the write
    params = cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = context
    params.count = 1
    params.paramArray = [operation]
    params.flags = 0
    return params


def add_edges(cu: Any, graph: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Orders each pair of nodes."""
    bindings_13 = "edgeData" in (cu.cuGraphAddDependencies.__doc__ or "").split("\n", 1)[0]
    data = (None,) if bindings_13 else ()
    check(cu.cuGraphAddDependencies(graph, list(before), list(after), *data, len(after)), "ordering nodes")


# -- launches: executable graphs, launched once beforehand, and destroyed


def instantiate(graph: Any) -> int:
    """Makes an executable graph. Its first launch moves it to the GPU, and takes longer than later ones.

    `cuGraphUpload` is not used: after an upload without a launch, with some graphs every kernel of every graph in the
    process starts 0.2 µs later (docs/results_notes.md).
    """
    return int(check(driver().cuGraphInstantiate(graph, 0), "instantiating a graph"))


def launch_once(executables: Iterable[int], stream: int, wait: bool = True) -> None:
    """Launches each graph, waiting for its end: the first launch moves a graph to the GPU, where other work may run.

    Without `wait`, for a GPU where no other work runs: returns at once, and `await_stream` waits for the end.
    """
    cu = driver()
    for each in executables:
        check(cu.cuGraphLaunch(each, stream), "launching a graph for the first time")
        if wait:
            await_stream(stream)


def await_stream(stream: int) -> None:
    check(driver().cuStreamSynchronize(stream), "launching a graph for the first time")


def cut(program: Program, bounds: Bounds, instance: Instance, sm_partitions: CudaPartitions | None) -> Launches:
    """Makes the segments launchable, on all SMs and inside the instance's partitions if partitions are given."""
    words = int(instance.words.ctypes.data)
    partitions = instance.partitions if sm_partitions is not None else ()
    made: list[list[int]] = []  # for each segment and the whole program: on all SMs, then in each partition
    try:
        with contextlib.closing(_graphs(program, bounds, words, instance.plan.n_words, bool(partitions))) as graphs:
            for graph in graphs:
                made.append([instantiate(graph.handle)])
                if partitions:
                    assert sm_partitions is not None
                    # Inside the partition if more of the program follows; outside if this is the whole program.
                    inside = len(graph.nodes) < len(program.nodes)
                    made[-1] += sm_partitions.confined(graph, partitions, end_inside=inside)
    except BaseException:
        _destroy(handle for each in made for handle in each)
        raise
    if len(made[-1]) == 1:  # the whole program cannot be confined, so its segments are not either
        _destroy(handle for each in made for handle in each[1:])
        made = [each[:1] for each in made]
    *handles, whole = (each[0] for each in made)
    # A segment without kernels that can be confined is launched on all SMs.
    confined = [
        ([each[1 + k] if len(each) > 1 else 0 for each in made[:-1]], made[-1][1 + k]) for k in range(len(made[-1]) - 1)
    ]
    return Launches(program, bounds, handles, whole, [instance], frozenset(program.marks.values()), confined)


def _graphs(
    program: Program, bounds: Bounds, words: int, n_words: int, changed: bool
) -> Generator[SegmentGraph, None, None]:
    """Graphs of the segments and of the whole program, each with the address of its completion word.

    `changed`: the caller may change their nodes. Otherwise the whole program needs no clone, if the graph is ours.
    """
    yield from segment_graphs(program.body, bounds, [words + 8 * k for k in range(len(bounds))])
    last = words + 8 * (n_words - 1)
    if changed or program.body.owner is not None:
        with segment_graph(program.body, 0, len(program.nodes), last) as whole:
            yield whole
    else:
        with ended_graph(program.body, last) as whole:
            yield whole


def launch_first(launches: Launches, wholes: bool, stream: int, wait: bool) -> None:
    """Launches every segment once, and the whole program if `wholes`; waits for the end of each launch if `wait`."""
    for handles, whole in launches.everywhere:
        # In order, as in service: a kernel may need results of a segment that cannot be confined.
        launch_once((own or wide for own, wide in zip(handles, launches.handles, strict=True)), stream, wait)
        if wholes:
            launch_once([whole], stream, wait)


def release(launches: Launches) -> None:
    for handles, whole in launches.everywhere:
        _destroy(handle for handle in (*handles, whole) if handle)
    launches.keep.clear()
    launches.handles.clear()
    launches.confined.clear()
    launches.whole = 0


def _destroy(executables: Iterable[int]) -> None:
    for each in executables:
        driver().cuGraphExecDestroy(each)


# -- the addresses among a node's arguments, and the weights that they point to


def pointers_of(node: Any) -> list[int] | None:
    """Every number among a kernel's arguments that could be an address; None if they cannot be read.

    Kernels of libraries have pointers inside structures, which are searched word by word.
    """
    cu = driver()
    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
    function = _function_of(params)
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
    nodes = read_graph(driver().CUgraph(graph.raw_cuda_graph())).nodes
    return [word for each in nodes if is_kernel(each) for word in pointers_of(each) or []]


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
        kind = _kind_of(node)
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


# -- SM partitions

# SMs per group of which green contexts consist, from compute capability 9 on; earlier GPUs have smaller groups
_GROUP_SMS = 8


class CudaPartitions:
    """Green contexts with the fraction `share` of the GPU's SMs each, evenly spread over the groups of SMs.

    Neighbouring partitions share SMs, so that free SMs are always covered by some partition.

    `sms` has the SMs of each partition, as numbers that identify SMs across partitions. If there are more partitions
    than groups, some partitions are equal and share a context.
    """

    def __init__(self, device: CudaDevice, count: int, share: float) -> None:
        self._device = device
        cu = driver()
        kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        every = check(cu.cuDeviceGetDevResource(device.index, kind), "reading the GPU's SMs")
        most = device.sm_count // _GROUP_SMS
        if most < 2:
            raise LaunchError(
                f"a GPU with {device.sm_count} SMs is too small for SM partitions: use sm_partitions=0",
                field="sm_partitions", given=count, limit=0,
            )  # fmt: skip
        found, n, rest = check(cu.cuDevSmResourceSplitByCount(most, every, 0, _GROUP_SMS), "splitting the SMs")
        groups = list(found)[: int(n)]
        self._allowed: set[tuple[int, int]] = set()  # kernels, and the shared memory that they may use
        self._green: list[Any] = []
        self._partitions: list[tuple[Any, Any]] = []  # the green context of each partition, and its ordinary context
        self.sms: list[set[int]] = []
        try:
            if rest.type == kind and rest.sm.smCount:  # an H200 has 15 groups, and 12 SMs that form no group
                try:
                    return self._open([*groups, rest], count, share)
                except LaunchError:  # some drivers do not combine these SMs with groups
                    self.close()
            self._open(groups, count, share)
        except BaseException:
            self.close()
            raise

    def _open(self, groups: list[Any], count: int, share: float) -> None:
        first_sm = np.cumsum([0, *(int(group.sm.smCount) for group in groups)])
        size = min(len(groups), math.ceil(share * self._device.sm_count / _GROUP_SMS))
        starts = [round(k * len(groups) / count) % len(groups) for k in range(count)]
        chosen = [[(first + k) % len(groups) for k in range(size)] for first in starts]
        self.sms = [{int(sm) for g in each for sm in range(first_sm[g], first_sm[g + 1])} for each in chosen]
        made: dict[int, tuple[Any, Any]] = {}
        for first, each in zip(starts, chosen, strict=True):
            if first not in made:
                made[first] = self._create([groups[k] for k in each])
            self._partitions.append(made[first])

    def _create(self, groups: list[Any]) -> tuple[Any, Any]:
        cu = driver()
        described = check(cu.cuDevResourceGenerateDesc(groups, len(groups)), "describing an SM partition")
        flags = int(cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        green = check(cu.cuGreenCtxCreate(described, self._device.index, flags), "creating an SM partition")
        self._green.append(green)
        CudaStream(self._device, 0, green)  # fails early with drivers that have such contexts but no streams in them
        return green, check(cu.cuCtxFromGreenCtx(green), "creating an SM partition")

    def stream(self, partition: int, priority: int) -> CudaStream:
        """A stream of a partition: graphs that run in the partition start sooner on it than on a stream of all SMs."""
        return CudaStream(self._device, priority, self._partitions[partition][0])

    def confined(self, graph: SegmentGraph, partitions: Sequence[int], end_inside: bool) -> list[int]:
        """Executable copies of this graph whose kernels stay inside each of these partitions; empty if they cannot.

        `end_inside`: the completion word is also written inside, so that later work on the same stream starts sooner.
        Long graphs should end outside: many long graphs that end inside slow each other, which lowered the total
        throughput of whole programs and delayed the completion of short ones.

        A node follows a context only if it names a CUkernel, which belongs to no context, instead of a function, which
        does. So kernels of modules that were loaded into a context stay on all SMs.
        """
        cu = driver()
        movable = []
        for node in map(cu.CUgraphNode, graph.nodes):
            if is_kernel(node):
                params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
                if int(params.kern):
                    self._allow_shared(params)
                    movable.append((node, int(params.kern)))
        made: list[int] = []
        try:
            for partition in partitions if movable else ():
                context = self._partitions[partition][1]
                for node, kernel in movable:
                    # Read again: the arguments lie in memory of the node, which moves with every change.
                    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
                    params.func, params.kern, params.ctx = cu.CUfunction(0), cu.CUkernel(kernel), context
                    check(cu.cuGraphKernelNodeSetParams(node, params), "sending a kernel to an SM partition")
                if end_inside:
                    graph.end_in(context)
                made.append(instantiate(graph.handle))
        except BaseException as e:
            for handle in made:
                cu.cuGraphExecDestroy(handle)
            if isinstance(e, LaunchError):  # for example, a grid that needs more SMs at once than a partition has
                return []
            raise
        return made

    def _allow_shared(self, params: Any) -> None:
        """Copies the shared-memory limit of a kernel, which was set for the function of the context that it leaves."""
        key = (int(params.kern), int(params.sharedMemBytes))
        if params.sharedMemBytes and key not in self._allowed:
            cu = driver()
            most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            had = check(cu.cuKernelGetAttribute(most, params.kern, self._device.index), "reading a kernel's limits")
            if int(had) < params.sharedMemBytes:
                check(
                    cu.cuKernelSetAttribute(most, params.sharedMemBytes, params.kern, self._device.index),
                    "allowing a kernel its shared memory",
                )
            self._allowed.add(key)

    def close(self) -> None:
        for green in self._green:
            driver().cuGreenCtxDestroy(green)
        self._green.clear()
        self._partitions.clear()
