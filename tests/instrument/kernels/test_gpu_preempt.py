"""On a real GPU: preempted launches run every block once and compute what plain ones do."""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from corpus import CUDA_CASES, TRITON_CASES, assert_same, upload
from failing import failing

import paellapy as pp
from paellapy.instrument.errors import InstrumentError

pytestmark = pytest.mark.gpu

REFUSED = {"spin_lock", "grid_barrier", "gemm_two_ctas", "cluster"}
# Every block takes a given number of ns and counts itself: one that runs twice, or not at all, shows.
SPIN = """
extern "C" __global__ void spin(unsigned* count, unsigned ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) atomicAdd(count + block, 1u);
}
"""


def pause(us: float) -> None:
    end = time.perf_counter() + us * 1e-6
    while time.perf_counter() < end:
        pass


def blink(flag: pp.Flag, rng: np.random.Generator, times: int, clear_us: float, set_us: float) -> None:
    """Sets and clears the flag; the longest time of each state is given."""
    for _ in range(times):
        pause(rng.uniform(0, clear_us))
        flag.set()
        pause(rng.uniform(0, set_us))
        flag.clear()


def finish(launch: pp.PreemptibleLaunch) -> None:
    """Resumes until every block has run."""
    while (run := launch._run) is not None:
        run.wait()
        if not launch.done and launch._run is run:
            launch.resume()


def attempts(least: int, met: list[int]) -> Iterator[float]:
    """Attempts until one met a running launch, as factors of its blocks' time.

    Beside another process the GPU may take up a launch and its flag only a few ms later, both at once. Then a longer
    launch still runs when the next flag comes.
    """
    yield from itertools.repeat(1.0, least)
    longer, until = 1.0, time.monotonic() + 30
    while not met and time.monotonic() < until:
        longer = min(longer * 1.5, 50.0)
        yield longer


@pytest.mark.alone  # the flag must meet a launch that runs
@pytest.mark.parametrize("grid", [(20_000,), (100, 200), (10, 20, 100)])
@pytest.mark.parametrize("report", [None, "count"])
def test_every_block_runs_once_however_often_it_is_preempted(grid: tuple[int, ...], report: Any, gpu: Any) -> None:
    spin, rng = pp.kernel(source=SPIN, name="spin", report=report), np.random.default_rng(len(grid))
    total = int(np.prod(grid))
    interrupted: list[int] = []
    for longer in attempts(10, interrupted):
        count = gpu.array(np.zeros(total, np.uint32))
        launch = spin.preemptible[grid, 128](count, np.uint32(20_000 * longer))
        for _ in range(8):
            pause(rng.uniform(0, 150 * longer))
            launch.preempt()
            left = launch.left
            assert len(np.unique(left)) == len(left)
            interrupted += [len(left)] if 0 < len(left) < total else []
            ran = count.numpy()
            assert (ran[left] == 0).all()
            assert (np.delete(ran, left) == 1).all()
            launch.resume()
        finish(launch)
        assert (count.numpy() == 1).all()
    assert interrupted


# Kernels whose blocks decide in different places: at the start, after loads, after copies, at the kernel's own barrier.
OPENINGS = {
    "nothing": "",
    "loads": "value = in[threadIdx.x]; value += in[value % 32];",
    "barrier": "place[threadIdx.x] = in[threadIdx.x]; __syncthreads(); value = place[threadIdx.x ^ 1];",
    "copies": """
        unsigned to = (unsigned)__cvta_generic_to_shared(place + threadIdx.x);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(in + threadIdx.x) : "memory");""",
    "branch": "if (threadIdx.x & 1) value = in[threadIdx.x];",
}
WHOLE = """
extern "C" __global__ void whole(const unsigned* in, unsigned* count, unsigned ns) {
    __shared__ unsigned place[256];
    unsigned value = 0;
    OPENING
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    atomicAdd(count + blockIdx.x, value < 1000 ? 1u : 1000u);
}
"""


@pytest.mark.alone  # the flag must meet a launch that runs
@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("opening", list(OPENINGS))
def test_a_block_runs_whole_or_not_at_all_wherever_it_decides(opening: str, threads: int, gpu: Any) -> None:
    kernel = pp.kernel(source=WHOLE.replace("OPENING", OPENINGS[opening]), name="whole", report=None)
    numbers, rng, blocks = gpu.array(np.arange(256, dtype=np.uint32)), np.random.default_rng(1), 30_000
    left_some: list[int] = []
    for longer in attempts(8, left_some):
        flag, count = gpu.flag(), gpu.array(np.zeros(blocks, np.uint32))
        launch = kernel.preemptible(flag)[blocks, threads](numbers, count, np.uint32(30_000 * longer))
        blink(flag, rng, 4, 60 * longer, 30)
        left = launch.left
        left_some += [len(left)] if len(left) else []
        assert (count.numpy()[left] == 0).all()
        assert (np.delete(count.numpy(), left) == threads).all()
        finish(launch)
        assert (count.numpy() == threads).all()
    assert left_some


def test_a_flag_that_comes_and_goes_loses_no_block(gpu: Any) -> None:
    spin, flag = pp.kernel(source=SPIN, name="spin", report=None), gpu.flag()
    rng = np.random.default_rng(1)
    for _ in range(30):
        count = gpu.array(np.zeros(30_000, np.uint32))
        launch = spin.preemptible(flag)[30_000, 256](count, np.uint32(5_000))
        blink(flag, rng, 6, 30, 10)
        left = launch.left
        assert (count.numpy()[left] == 0).all()
        finish(launch)
        assert (count.numpy() == 1).all()


@pytest.mark.alone  # the flag must meet the first launch while it runs
def test_a_queue_under_one_flag_is_preempted_as_a_whole_and_later_launches_are_not(gpu: Any) -> None:
    spin, flag = pp.kernel(source=SPIN, name="spin", report=None), gpu.flag()
    counts = [gpu.array(np.zeros(20_000, np.uint32)) for _ in range(5)]
    spin.preemptible(flag)[1, 128](counts[4], np.uint32(1)).synchronize()  # compiled before it counts
    counts[4] = gpu.array(np.zeros(20_000, np.uint32))
    # Each launch takes some 2 ms: the first still runs when the flag is set, however long the host took.
    launches = [spin.preemptible(flag)[20_000, 128](count, np.uint32(200_000)) for count in counts[:4]]
    pause(60)
    flag.set()
    later = spin.preemptible(flag)[20_000, 128](counts[4], np.uint32(1_000))
    left = [len(launch.left) for launch in launches]
    assert left[1:] == [20_000] * 3
    later.synchronize()
    for launch in launches:
        finish(launch)
    assert all((count.numpy() == 1).all() for count in counts)


@pytest.mark.alone  # the flag must meet a launch that runs
@pytest.mark.parametrize("us", [30, 100, 1000])
def test_slices_keep_every_block(us: int, gpu: Any) -> None:
    spin = pp.kernel(source=SPIN, name="spin", report=None)  # a million blocks take 50 ms: they still run
    preempted = 0
    for _ in range(5):  # beside other processes on the GPU, what sets the flag may come late
        count = gpu.array(np.zeros(1_000_000, np.uint32))
        launch = spin.preemptible(turnaround=pp.Turnaround(us=us))[1_000_000, 128](count, np.uint32(100_000))
        pause(100)
        launch.preempt()
        preempted += len(launch.left)
        finish(launch)
        assert (count.numpy() == 1).all()
        if preempted:
            break
    assert preempted


def test_a_traced_launch_has_every_block_once(gpu: Any) -> None:
    spin = pp.kernel(source=SPIN, name="spin", report=None)
    count = gpu.array(np.zeros(20_000, np.uint32))
    with pp.trace() as trace:
        launch = spin.preemptible[20_000, 128](count, np.uint32(20_000))
        pause(80)
        launch.preempt()
        left = launch.left
        finish(launch)
    assert trace.dropped == trace.unfinished == 0
    assert np.array_equal(np.sort(trace.blocks["block"]), np.arange(20_000))
    again = trace.blocks["block"][trace.blocks["launch"] != trace.launches["launch"][0]]
    assert np.array_equal(np.sort(again), left)


@contextmanager
def disturbed(flag: pp.Flag, seed: int) -> Iterator[None]:
    """Sets the flag again and again in a thread, at intervals that grow: beside other processes a launch may start so
    late that a flag at short intervals would always be ahead of it.
    """
    stop, rng = threading.Event(), np.random.default_rng(seed)

    def run() -> None:
        most_us = 40.0
        while not stop.is_set():
            pause(rng.uniform(5, most_us))
            flag.set()
            most_us *= 1.02

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("case", [c for c in TRITON_CASES if c.name not in REFUSED and c.min_sm <= 90], ids=str)
def test_preempted_triton_kernels_compute_the_same(case: Any, gpu: Any) -> None:
    call = case.make(np.random.default_rng(zlib.crc32(case.name.encode())), 1.0)
    kernel, rest, flag = pp.kernel(case.kernel, report=None), {**call.constexprs, **call.options}, gpu.flag()

    def fresh() -> dict[str, Any]:
        return {name: upload(gpu, value) for name, value in call.args.items()}

    args = fresh()
    kernel[call.grid](**args, **rest)
    plain = {name: args[name].numpy() for name in call.outputs}
    for k in range(5):
        args = fresh()
        with disturbed(flag, k):
            finish(kernel.preemptible(flag)[call.grid](**args, **rest))
        assert_same(case, call, {name: args[name].numpy() for name in call.outputs}, plain)


@pytest.mark.parametrize(
    "case", [c for c in CUDA_CASES if c.launchable and c.instrumentable and c.name not in REFUSED], ids=str
)
def test_preempted_cuda_kernels_compute_the_same(case: Any, gpu: Any) -> None:
    call = case.make(np.random.default_rng(zlib.crc32(case.name.encode())), 1.0)
    name = case.name_expression or case.entry
    kernel = pp.kernel(source=case.source, name=name, options=case.options, report="count")
    config, flag = (call.grid, call.block, call.shared_bytes), gpu.flag()
    args = [upload(gpu, value) for value in call.args]
    kernel[config](*args)
    plain = {i: args[i].numpy() for i in call.outputs}
    for k in range(5):
        args = [upload(gpu, value) for value in call.args]
        with disturbed(flag, k):
            finish(kernel.preemptible(flag)[config](*args))
        assert_same(case, call, {i: args[i].numpy() for i in call.outputs}, plain)


@pytest.mark.parametrize("name", sorted(REFUSED - {"cluster"}))
def test_kernels_whose_blocks_depend_on_each_other_are_refused(name: str, gpu: Any) -> None:
    case = next(c for c in TRITON_CASES if c.name == name)
    call = case.make(np.random.default_rng(1), 0.3)
    args = {name: upload(gpu, value) for name, value in call.args.items()}
    with failing(InstrumentError, field="preempt"):
        pp.kernel(case.kernel).preemptible[call.grid](**args, **call.constexprs, **call.options)
