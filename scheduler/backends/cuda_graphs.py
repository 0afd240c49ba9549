"""CUDA graphs: reading a captured graph, and cutting it into graphs that end by writing a word.

A segment is a clone of the captured graph without the nodes outside the segment, plus one node that writes the
completion word to pinned memory after all others. The write includes a system-wide fence, so the outputs are visible
with it. Cutting touches every node several times and takes a third of a load that finds its profile stored. So there
nodes are handles, which go to the driver through ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.driver import check, driver, fail, library
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.models.program import Node, NodeKind
from paellapy.scheduler.models.segments import topological

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
    kind = check(cu.cuGraphNodeGetType(node), "reading a graph's node")
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
            "or CuPy's arrays, which come from the lane's arena"
        )
    return Node("other", kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())


def _describe_kernel(device: CudaDevice, node: Any) -> Node:
    cu = driver()
    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
    function = params.func
    if not int(function):  # launched as a CUkernel, as the runtime does
        function = check(cu.cuKernelGetFunction(params.kern), "finding a kernel's function")
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


def _copy_kind(cu: Any, copy: Any) -> NodeKind:
    host = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    if copy.srcMemoryType == host:
        return "h2d"
    return "d2h" if copy.dstMemoryType == host else "d2d"


def instantiate(graph: Any) -> int:
    """Makes an executable graph. Its first launch moves it to the GPU, and takes longer than later ones.

    `cuGraphUpload` is not used: after an upload without a launch, with some graphs every kernel of every graph in the
    process starts 0.2 µs later (benchmarks/kernel_gaps.py).
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


def segment(graph: CapturedGraph, first: int, end: int, word: int) -> int:
    """An executable graph of some nodes that ends by writing 1 to the word at an address."""
    with segment_graph(graph, first, end, word) as made:
        return instantiate(made.handle)


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


def is_kernel(node: Any) -> bool:
    cu = driver()
    kind = check(cu.cuGraphNodeGetType(node), "reading a graph's node")
    return bool(kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


def add_edge(cu: Any, graph: Any, before: Any, after: Any) -> None:
    add_edges(cu, graph, [before], [after])


def add_edges(cu: Any, graph: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Orders each pair of nodes."""
    bindings_13 = "edgeData" in (cu.cuGraphAddDependencies.__doc__ or "").split("\n", 1)[0]
    data = (None,) if bindings_13 else ()
    check(cu.cuGraphAddDependencies(graph, list(before), list(after), *data, len(after)), "ordering nodes")
