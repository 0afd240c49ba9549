"""SM windows on CUDA: green contexts with some of the SMs each, and captured graphs whose kernels stay inside one.

Neighbouring windows share SMs, so that free SMs are always covered by some window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.instrument.device.cuda import CudaDevice
from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.errors import LaunchError
from paellapy.scheduler.backends.cuda_graphs import SegmentGraph, instantiate, is_kernel

# SMs per group of which green contexts consist, from compute capability 9 on; earlier GPUs have smaller groups
_GROUP_SMS = 8


class CudaWindows:
    """A number of windows with the fraction `share` of the GPU's SMs, evenly spread over the groups of SMs.

    `sms` has the SMs of each window, as numbers that identify SMs across windows. If there are more windows than
    groups, some windows are equal and share a context.
    """

    def __init__(self, device: CudaDevice, count: int, share: float) -> None:
        self._device = device
        cu = driver()
        kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        every = check(cu.cuDeviceGetDevResource(device.index, kind), "reading the GPU's SMs")
        most = device.sm_count // _GROUP_SMS
        if most < 2:
            raise LaunchError(f"a GPU with {device.sm_count} SMs is too small for windows of SMs: use sm_windows=0")
        found, n, rest = check(cu.cuDevSmResourceSplitByCount(most, every, 0, _GROUP_SMS), "splitting the SMs")
        groups = list(found)[: int(n)]
        self._allowed: set[tuple[int, int]] = set()  # kernels, and the shared memory that they may use
        self._green: list[Any] = []
        self._windows: list[tuple[Any, Any]] = []  # the green context of each window, and its ordinary context
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
            self._windows.append(made[first])

    def _create(self, groups: list[Any]) -> tuple[Any, Any]:
        cu = driver()
        described = check(cu.cuDevResourceGenerateDesc(groups, len(groups)), "describing a window of SMs")
        flags = int(cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        green = check(cu.cuGreenCtxCreate(described, self._device.index, flags), "creating a window of SMs")
        self._green.append(green)
        CudaStream(self._device, 0, green)  # fails early with drivers that have such contexts but no streams in them
        return green, check(cu.cuCtxFromGreenCtx(green), "creating a window of SMs")

    def stream(self, window: int, priority: int) -> CudaStream:
        """A stream of a window: graphs that run in the window start sooner on it than on a stream of all SMs."""
        return CudaStream(self._device, priority, self._windows[window][0])

    def confined(self, graph: SegmentGraph, windows: Sequence[int], end_inside: bool) -> list[int]:
        """Executable copies of this graph whose kernels stay inside each of these windows; empty if they cannot.

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
            for window in windows if movable else ():
                context = self._windows[window][1]
                for node, kernel in movable:
                    # Read again: the arguments lie in memory of the node, which moves with every change.
                    params = check(cu.cuGraphKernelNodeGetParams(node), "reading a kernel's node")
                    params.func, params.kern, params.ctx = cu.CUfunction(0), cu.CUkernel(kernel), context
                    check(cu.cuGraphKernelNodeSetParams(node, params), "sending a kernel to a window of SMs")
                if end_inside:
                    graph.end_in(context)
                made.append(instantiate(graph.handle))
        except BaseException as e:
            for handle in made:
                cu.cuGraphExecDestroy(handle)
            if isinstance(e, LaunchError):  # for example, a grid that needs more SMs at once than a window has
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
        self._windows.clear()
