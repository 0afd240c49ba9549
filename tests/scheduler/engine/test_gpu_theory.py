"""A real GPU against queueing theory, as test_theory.py of the simulator has the simulated one.

Programs fill the GPU, so it is one server. Their times are measured; requests come at random times, and the theory is
an ideal server that gets the same requests at the same times: the mean of M/D/1 and M/G/1 without their spread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from ideal_server import ideal_ends

import paellapy as pp
from paellapy.scheduler.core.errors import DeadlineError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.scheduler.policies.policy import find_policy

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SIZES = (1, 4, 16, 48)  # kernels of a program
BLOCKS = 132 * 16  # fill an H200
ONES = {"x": np.ones(64, np.float32)}
TIGHT_NS = 2e6  # between the end in an ideal schedule and the deadline: segments in flight, and what Python takes


@pp.kernel
@triton.jit
def burn(x, out, factor, rounds, B: tl.constexpr):
    """Copies x, which takes some 200 µs."""
    i = tl.arange(0, B)
    value = tl.load(x + i, mask=i < 64)
    nothing = value * 0.0
    for _ in range(rounds):
        nothing = nothing * factor + nothing
    tl.store(out + i, value + nothing, mask=(i < 64) & (tl.program_id(0) == 0))


def program(kernels: int, rounds: int = 10_000) -> Model:
    def fn(weights: Any, inputs: Any, outputs: Any) -> None:
        source = inputs["x"]
        for k in range(kernels):
            target = outputs["y"] if k == kernels - 1 else pp.empty(source.shape)
            burn[(BLOCKS,)](source, target, 0.5, rounds, B=128, num_warps=4)
            source = target

    spec = TensorSpec((64,))
    return Model(f"burn{kernels}", fn, inputs={"x": spec}, outputs={"y": spec}, batch=(1,), instances=32)


@pytest.fixture(scope="module")
def engine():
    with Engine("cuda", quantum_us=200) as made:
        for kernels in SIZES:
            made.load(program(kernels))
        for kernels in SIZES:
            made.infer_sync(f"burn{kernels}", ONES)
        yield made


def work_ns(engine: Engine, whole: bool) -> np.ndarray:
    """The programs' times alone, in one piece or in segments."""
    found = [engine.profile(f"burn{kernels}")[0] for kernels in SIZES]
    return np.array([each.whole_ns if whole else max(each.whole_ns, each.segmented_ns) for each in found])


def offered(engine: Engine, at_ns: np.ndarray, of: np.ndarray, due_ns: np.ndarray | None = None) -> tuple[Any, Any]:
    """When requests came, at these times or as soon as a busy host can, and when they were answered; 0: never."""
    came, ended = np.zeros(len(at_ns), np.int64), np.zeros(len(at_ns), np.int64)

    async def one(k: int, begin: int) -> None:
        came[k] = time.monotonic_ns() - begin
        due_ms = None if due_ns is None else max(1e-3, (due_ns[k] - came[k]) * 1e-6)
        with contextlib.suppress(DeadlineError):
            await engine.infer(f"burn{SIZES[of[k]]}", ONES, deadline_ms=due_ms)
            ended[k] = time.monotonic_ns() - begin

    async def main() -> None:
        begin, tasks = time.monotonic_ns(), []
        for k, at in enumerate(at_ns):
            while time.monotonic_ns() - begin < at:
                await asyncio.sleep(0)  # timers of asyncio are a millisecond late
            tasks.append(asyncio.create_task(one(k, begin)))
        await asyncio.gather(*tasks)

    asyncio.run(main())
    return came, ended


def arrivals(seed: int, n: int, mean_ns: float, load: float) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(mean_ns / load, n)).astype(np.int64)


@pytest.mark.parametrize("policy", ["fifo", "serial", "edf"])
def test_equal_jobs_wait_as_in_an_m_d_1_queue(engine, policy):
    engine.set_policy(replace(find_policy(policy), active=1))
    alone_ns = work_ns(engine, whole=True)[2]
    came, ended = offered(engine, arrivals(1, 200, alone_ns, 0.7), np.full(200, 2))
    ideal = ideal_ends(came, np.full(200, alone_ns), lambda k, _: k)
    assert (ended - came).mean() == pytest.approx((ideal - came).mean(), rel=0.1)


@pytest.mark.parametrize("policy", ["fifo", "serial"])
def test_unequal_jobs_in_order_wait_as_in_an_m_g_1_queue(engine, policy):
    engine.set_policy(replace(find_policy(policy), active=1))
    alone_ns = work_ns(engine, whole=True)
    of = np.random.default_rng(2).integers(0, len(SIZES), 200)
    came, ended = offered(engine, arrivals(2, 200, alone_ns.mean(), 0.6), of)
    ideal = ideal_ends(came, alone_ns[of], lambda k, _: k)
    assert (ended - came).mean() == pytest.approx((ideal - came).mean(), rel=0.1)


@pytest.mark.parametrize("policy", ["edf", "lax"])
def test_deadlines_that_can_be_met_are_met(engine, policy):
    """Deadlines soon after the ends of a schedule in a random order, so that an ideal server meets all of them. Two
    jobs at once would be a tenth quicker here, and miss a tenth of the deadlines.
    """
    engine.set_policy(replace(find_policy(policy), active=1))
    random, segmented_ns = np.random.default_rng(3), work_ns(engine, whole=False)
    of, order = random.integers(0, len(SIZES), 300), random.permutation(300)
    at_ns = arrivals(3, 300, segmented_ns.mean(), 0.6)
    due_ns = ideal_ends(at_ns, segmented_ns[of], lambda k, _: order[k]) + TIGHT_NS
    _, ended = offered(engine, at_ns, of, due_ns)
    met = (ended > 0) & (ended <= due_ns)
    assert met[20:].mean() >= 0.99  # the first programs are in one piece until others have to overtake them
