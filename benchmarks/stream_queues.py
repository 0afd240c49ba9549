"""Finds streams that wait for each other although they are different: these share a hardware queue.

    python benchmarks/stream_queues.py [--streams 64] [--kernels 2,100] [--connections 8,32] [--out DIR]

On one stream a kernel waits for a word, and further kernels follow it, which the GPU cannot start yet. Meanwhile every
other stream gets kernels that write words of their own, as many, or the second number of `--kernels 100x2`. If such a
word is not written, its stream waits behind the first. This is repeated for every stream, with kernels launched one by
one; as graphs that end with a completion word; as such graphs with another graph of the same stream behind the first;
and as graphs whose kernels are confined to a window of SMs (a green context), from streams of the window, with the
completion word written inside it and outside. Each number of hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) runs in its
own process. CUDA only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import need_gpu, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paellapy.instrument.device.cuda_memory import CudaStream
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.queues import VARIABLE as QUEUES
from paellapy.scheduler.backends.cuda_graphs import CudaWindows, instantiate, read_graph, segment_graph
from paellapy.scheduler.core.tuning import Tuning

WINDOWS = 4
SETTLE_S = 0.002  # without a word: what can run has run by then
MOST_STREAMS = 512
FIRST, LAST, END = range(3)  # words of a stream: of its kernels but the last, of that, and of its graph
GATE = 3 * MOST_STREAMS  # what the first kernel waits for
GIVE_UP_S = 120
# `wait_for` gives up after a second: whatever else goes wrong, the GPU is not held for ever.
KERNELS = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry wait_for(.param .u64 at)
{
    .reg .b64 %address, %seen, %began, %now;
    .reg .pred %go, %late;
    ld.param.u64 %address, [at];
    mov.u64 %began, %globaltimer;
AGAIN:
    ld.relaxed.sys.u64 %seen, [%address];
    setp.ne.u64 %go, %seen, 0;
    @%go bra DONE;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %began;
    setp.gt.u64 %late, %now, 1000000000;
    @!%late bra AGAIN;
DONE:
    ret;
}
.visible .entry write_one(.param .u64 at)
{
    .reg .b64 %address, %one;
    ld.param.u64 %address, [at];
    mov.u64 %one, 1;
    st.release.sys.u64 [%address], %one;
    ret;
}
\0"""


class Streams:
    """Streams, and two chains of work for each: one that waits for the gate, and one that writes its words."""

    def __init__(self, device: Any, count: int, length: int, others: int) -> None:
        cu = driver()
        self.device, self.count = device, count
        self.lengths = {True: length, False: others}  # of the chain that waits, and of those that write
        self.words = device._allocate_pinned(8 * (GATE + 1))
        library = check(cu.cuLibraryLoadData(KERNELS, [], [], 0, [], [], 0), "loading kernels")
        self.wait_for, self.write_one = (
            check(cu.cuLibraryGetKernel(library, name), "finding a kernel") for name in (b"wait_for", b"write_one")
        )
        self.windows = CudaWindows(device, WINDOWS, Tuning.for_device(device).window_share)
        self.wide = [CudaStream(device, 0) for _ in range(count)]
        self.narrow = [self.windows.stream(k % WINDOWS, 0) for k in range(count)]
        self.upload = CudaStream(device, 0)
        self.keep: list[Any] = []

    def address(self, word: int) -> int:
        return int(self.words.ctypes.data) + 8 * word

    def arguments(self, word: int) -> int:
        value = np.array([self.address(word)], np.uint64)
        pointers = np.array([value.ctypes.data], np.uint64)
        self.keep += [value, pointers]
        return int(pointers.ctypes.data)

    def chain(self, k: int, waits: bool) -> list[tuple[Any, int]]:
        """The kernels of a stream, and the words that they read or write."""
        more = [(self.write_one, 3 * k + FIRST)] * (self.lengths[waits] - 1)
        first = [(self.wait_for, GATE)] if waits else more[:1]
        return [*first, *more[1:], (self.write_one, 3 * k + LAST)]

    def kernels(self, k: int, waits: bool) -> Any:
        """Launches the kernels, one by one."""
        cu, stream = driver(), self.wide[k].handle
        chain = [(kernel, self.arguments(word)) for kernel, word in self.chain(k, waits)]

        def launch() -> None:
            for kernel, arguments in chain:
                done = cu.cuLaunchKernel(cu.CUfunction(int(kernel)), 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)
                check(done, "launching a kernel")

        return launch

    def graph(self, k: int, waits: bool, window: int | None, inside: bool) -> Any:
        """Launches the kernels as a graph with a completion word at its end."""
        cu = driver()
        handle = check(cu.cuGraphCreate(0), "creating a graph")
        before: list[Any] = []
        for kernel, word in self.chain(k, waits):
            params = cu.CUDA_KERNEL_NODE_PARAMS()
            params.kern, params.func = kernel, cu.CUfunction(0)
            params.gridDimX = params.gridDimY = params.gridDimZ = 1
            params.blockDimX = params.blockDimY = params.blockDimZ = 1
            params.kernelParams = self.arguments(word)
            params.ctx = check(cu.cuCtxGetCurrent(), "reading the context")
            before = [check(cu.cuGraphAddKernelNode(handle, before, len(before), params), "adding a kernel")]
        captured = read_graph(handle)
        with segment_graph(captured, 0, self.lengths[waits], self.address(3 * k + END)) as part:
            if window is None:
                executable, stream = instantiate(part.handle), self.wide[k].handle
            else:
                (executable,) = self.windows.confined(part, [window], end_inside=inside)
                stream = self.narrow[k].handle
        captured.destroy()
        # Now: at its launch it would have to get past what waits.
        check(cu.cuGraphUpload(executable, self.upload.handle), "uploading a graph")
        self.upload.synchronize()
        return lambda: check(cu.cuGraphLaunch(executable, stream), "launching a graph")

    def pair(self, k: int, waits: bool) -> Any:
        """Where it waits, a graph that only writes is launched behind it."""
        first = self.graph(k, waits, None, False)
        if not waits:
            return first
        second = self.graph(k, False, None, False)

        def launch() -> None:
            first()
            second()

        return launch

    def ways(self) -> dict[str, Any]:
        return {
            "kernels": self.kernels,
            "graphs": lambda k, waits: self.graph(k, waits, None, False),
            "graphs, another behind the first": self.pair,
            "graphs in windows, end inside": lambda k, waits: self.graph(k, waits, k % WINDOWS, True),
            "graphs in windows, end outside": lambda k, waits: self.graph(k, waits, k % WINDOWS, False),
        }

    def settle(self) -> None:
        seen = -1
        while seen != (seen := int(self.words[:GATE].sum())):
            time.sleep(SETTLE_S)

    def who_waits(self, make: Any, words: tuple[int, ...]) -> list[list[int]]:
        """For each stream, those that wait while it does: of which one of the words is not written."""
        holds, marks = ([make(k, waits) for k in range(self.count)] for waits in (True, False))
        found = []
        for once_before in (True, False):  # the first launch on a stream opens it
            found = []
            for k in range(self.count):
                self.words[:] = 0
                holds[k]()
                for j, mark in enumerate(marks):
                    if j != k:
                        mark()
                self.settle()
                written = self.words[:GATE].reshape(-1, 3)[: self.count, words].all(axis=1)
                if self.words[3 * k + LAST]:
                    raise RuntimeError("the first kernel gave up waiting before all others were launched")
                found.append([j for j in range(self.count) if j != k and not written[j]])
                self.words[GATE] = 1
                self.device.synchronize()
                if once_before and k >= 1:
                    break
        return found


def child(count: int, lengths: str) -> None:
    device = need_gpu("streams of CUDA")
    first, _, others = lengths.partition("x")
    streams = Streams(device, count, int(first), int(others or first))
    found: dict[str, Any] = {}
    for name, make in streams.ways().items():
        try:
            found[name] = streams.who_waits(make, (FIRST, LAST) if name == "kernels" else (FIRST, LAST, END))
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    print(json.dumps(found))


def in_process(queues: str, length: str, count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--streams", str(count), "--kernels", length]
    run = subprocess.run(
        command, env={**os.environ, QUEUES: queues}, capture_output=True, text=True, check=False, timeout=GIVE_UP_S
    )
    if run.returncode:
        raise SystemExit(run.stderr or run.stdout)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kernels", default="2,100", help="kernels per stream; 100x2: 100 on the first, 2 on others")
    parser.add_argument("--connections", default="8,32")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 2 <= args.streams <= MOST_STREAMS:
        raise SystemExit(f"--streams {args.streams}: give a number from 2 to {MOST_STREAMS}")
    given = [re.fullmatch(r"(\d+)(?:x(\d+))?", each) for each in args.kernels.split(",")]
    if not all(each and int(each[1]) >= 2 and int(each[2] or 2) >= 2 for each in given):
        raise SystemExit(f"--kernels {args.kernels}: give numbers from 2 on, or two of them as in 100x2")
    if args.child:
        return child(args.streams, args.kernels)
    results: dict[str, Any] = {}
    table = Table(title=f"{args.streams} streams: how many others wait behind each", box=None)
    for column in ("hardware queues", "kernels", "launched as", "others that wait: streams", "the first's"):
        table.add_column(column)
    rounds = list(product(args.connections.split(","), args.kernels.split(",")))
    device = need_gpu("streams of CUDA")
    for number, length in track(rounds, description="processes"):
        found = results.setdefault(number, {})[length] = in_process(number, length, args.streams)
        for name, waits in found.items():
            if isinstance(waits, str):
                table.add_row(number, length, name, waits)
                continue
            sizes = Counter(len(each) for each in waits)
            shown = ", ".join(f"{n}: {sizes[n]}" for n in sorted(sizes))
            table.add_row(number, length, name, shown, " ".join(map(str, waits[0][:8])))
        path = save("stream_queues", results, device, args.out)  # what there is, should a later one fail
    Console(width=120).print(table)
    print(path)
    return None


if __name__ == "__main__":
    main()
