"""Long inputs are copied by a thread of their own: nothing is lost, mixed up, or read after it is gone."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model

from paellapy.scheduler.core import processes
from paellapy.scheduler.core.codes import COPY_BELL
from paellapy.scheduler.core.copier import Copier
from paellapy.scheduler.core.errors import DeadlineError
from paellapy.scheduler.core.processes import spare_a_cpu, usable_cpus
from paellapy.scheduler.core.rings import Bell
from paellapy.scheduler.core.state import new_state
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine

N = Tuning.for_part("h200").long_copy_bytes // 4 + 3


@pytest.fixture(params=[False, True])
def engine(request):
    with Engine("virtual:h200") as found:
        copier = Copier(found.state, found.core.bell, awake=request.param)
        found.load(scale_model("long", 3.0, n=N, batch=(1, 2, 4), instances=2))
        found.load(scale_model("short", 5.0, n=8, batch=(1,), instances=1))
        yield found
        copier.close()


def infer_many(engine, n, seed, deadlines=False):
    """Outcomes of many concurrent requests, some of which are cancelled, and their inputs."""
    rng = np.random.default_rng(seed)
    names = rng.choice(["long", "short"], n)
    x = [rng.standard_normal(N if name == "long" else 8).astype(np.float32) for name in names]

    async def main():
        work = []
        for name, each in zip(names, x, strict=True):
            due = float(rng.uniform(0.5, 30)) if deadlines and rng.random() < 0.5 else None
            work.append(asyncio.ensure_future(engine.infer(name, {"x": each}, due)))
            if rng.random() < 0.1:
                await asyncio.sleep(0)
                work[int(rng.integers(len(work)))].cancel()
        return await asyncio.gather(*work, return_exceptions=True)

    return names, x, asyncio.run(main())


@pytest.mark.parametrize("deadlines", [False, True])
def test_every_answer_is_right_while_other_requests_are_cancelled(engine, deadlines):
    answered = 0
    for seed in range(6):
        names, x, found = infer_many(engine, 80, seed, deadlines)
        for name, given, outcome in zip(names, x, found, strict=True):
            if isinstance(outcome, dict):
                answered += 1
                np.testing.assert_array_equal(outcome["y"], given * np.float32(3 if name == "long" else 5))
            else:
                assert isinstance(outcome, asyncio.CancelledError | DeadlineError), outcome
    assert answered > 100
    assert engine.state.copy_ring[0, 0] > 0  # some had to wait, and were copied there
    check_at_rest(engine.state)
    assert engine.state.copy_ring[0, 0] == engine.state.copy_ring[1, 0]


def test_a_model_leaves_while_its_inputs_are_being_copied(engine):
    x = {"x": np.ones(N, np.float32)}

    async def main():
        work = [asyncio.ensure_future(engine.infer("long", x)) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.unload, "long")
        return await asyncio.gather(*work, return_exceptions=True)

    for outcome in asyncio.run(main()):
        assert isinstance(outcome, dict)  # accepted, and so answered
        assert (outcome["y"] == 3).all()
    check_at_rest(engine.state)


def sleeps(state, within_s):
    """Whether the thread says within that time that it will sleep."""
    until = time.monotonic() + within_s
    while not state.copy_ring[COPY_BELL, 0] and time.monotonic() < until:
        time.sleep(0.001)
    return bool(state.copy_ring[COPY_BELL, 0])


@pytest.mark.parametrize("awake", [False, True])
def test_a_copier_that_stays_awake_sleeps_after_the_last_request(awake):
    state = new_state()
    state.core["live"][0] = 1
    bell = Bell(state.bell)
    copier = Copier(state, bell, awake)
    try:
        assert sleeps(state, 0.3 if awake else 60) == (not awake)
        state.core["live"][0] = 0
        assert sleeps(state, 60)
    finally:
        copier.close()
        bell.close()


def test_a_copier_that_stays_awake_can_be_closed_during_requests():
    state = new_state()
    state.core["live"][0] = 1
    bell = Bell(state.bell)
    Copier(state, bell, awake=True).close()
    bell.close()


@pytest.mark.parametrize(("says", "most"), [("150000 100000", 1.5), ("max 100000", 1 << 20), ("", 1 << 20)])
def test_usable_cpus_are_within_the_quota_of_the_container(tmp_path, says, most):
    quota = tmp_path / "cpu.max"
    quota.write_text(says)
    assert usable_cpus(quota) == min(len(os.sched_getaffinity(0)), most)
    assert usable_cpus(tmp_path / "nowhere") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("cpus", "threads", "left"), [(8.0, 8, 7), (8.0, 5, 5), (6.5, 8, 5), (2.0, 2, 2)])
def test_a_cpu_is_left_to_the_loop_where_pytorch_has_a_thread_for_each(monkeypatch, cpus, threads, left):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    monkeypatch.setattr(processes, "usable_cpus", lambda: cpus)
    torch.set_num_threads(threads)
    try:
        assert spare_a_cpu() is (left < threads)
        assert torch.get_num_threads() == left
        assert not spare_a_cpu()
    finally:
        torch.set_num_threads(before)
