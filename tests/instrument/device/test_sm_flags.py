"""Flags of the SM model: blocks that start while their flag is set do not run, and every block runs once in the end."""

from __future__ import annotations

import dataclasses

import numpy as np
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_timing import EXACT, H200

from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model.commands import Kernel, Under
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.records import MOST_EPOCHS

SMALL = dataclasses.replace(H200, gpc_sms=(2, 2), concurrent_grids=8)


def kernel(blocks: np.ndarray, flag: int, epoch: int, work: bool = False) -> Kernel:
    how = {"cost": BlockCost(bytes=5000, flops=9000)} if work else {"duration_ns": 40}
    return Kernel(len(blocks), 1024, 32, under=Under(flag, epoch, blocks), **how)  # type: ignore[arg-type]


changes = st.lists(
    st.tuples(st.integers(1, 150), st.booleans()), max_size=12
)  # after so many ns the flag is set or not


@settings(max_examples=80)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), changes, st.booleans(), st.integers(0, 2**31))
def test_whenever_the_flag_changes_every_block_runs_once(
    grids: list[int], script: list[tuple[int, bool]], work: bool, seed: int
) -> None:
    """Several launches under one flag, each made again with what is left until nothing is."""
    sim = SmModel(SMALL, timing=EXACT, seed=seed)
    streams = [sim.stream() for _ in grids]
    flag, bystander = sim.flag(), sim.stream()
    beside = sim.launch(bystander, Kernel(30, 512, 32, duration_ns=25), trace=False)
    todo: list[np.ndarray] = [np.arange(n) for n in grids]
    handles = [sim.launch(streams[k], kernel(b, flag, 1, work), launch_id=k) for k, b in enumerate(todo)]
    script, rounds = list(script), 0
    while any(len(blocks) for blocks in todo):
        while script and sim.next_event_ns < np.inf:
            after, is_set = script.pop()
            sim.run(sim.now_ns + after)
            sim.set_flag(flag, int(is_set))
        sim.run()
        for k, handle in enumerate(handles):
            if len(todo[k]):
                todo[k] = sim.take_left(handle)
        if not script:
            sim.set_flag(flag, 0)
        rounds += 1
        for k, blocks in enumerate(todo):
            if len(blocks):
                handles[k] = sim.launch(streams[k], kernel(blocks, flag, 1, work), launch_id=k)
    assert sim.done(beside)
    assert rounds <= len(grids) * 14
    ran = sim.blocks()
    for k, n in enumerate(grids):
        assert sorted(ran["block"][ran["launch"] == k]) == list(range(n))
    assert (ran["end_ns"] > ran["start_ns"]).all()
    sim.check_integrity()


def test_blocks_on_an_sm_run_on_and_the_others_leave_at_once() -> None:
    sim = SmModel(SMALL, timing=EXACT)
    stream, flag = sim.stream(), sim.flag()
    handle = sim.launch(stream, kernel(np.arange(100, 140), flag, 7))  # eight at a time
    sim.run(60)
    sim.set_flag(flag, 7)
    sim.run()
    assert sorted(sim.blocks()["block"]) == list(range(100, 116)), "those that had started by then"
    assert list(sim.left(handle)) == list(range(116, 140))
    assert sim.finish_ns(handle) < 60 + 40 + 4, "what does not run takes no time of its own"
    assert list(sim.take_left(handle)) == list(range(116, 140))
    with failing(LaunchError, field="left"):
        sim.take_left(handle)


def test_a_flag_set_for_earlier_launches_lets_later_ones_run() -> None:
    sim = SmModel(SMALL, timing=EXACT)
    flag = sim.flag()
    sim.set_flag(flag, 3)
    earlier, at, later = (sim.launch(sim.stream(), kernel(np.arange(5), flag, epoch)) for epoch in (2, 3, 4))
    sim.run()
    assert [len(sim.left(h)) for h in (earlier, at, later)] == [5, 5, 0]


def test_blocks_that_do_not_run_are_in_no_counter_and_no_trace() -> None:
    sim = SmModel(SMALL, timing=EXACT)
    flag = sim.flag()
    sim.set_flag(flag, 1)
    sim.launch(sim.stream(), kernel(np.arange(9), flag, 1))
    sim.run()
    assert not sim.lines["started"].any()
    assert len(sim.blocks()) == 0
    assert sim.use_until(sim.now_ns)[1].sum() == 0
    sim.check_integrity()


def test_what_cannot_be_is_refused() -> None:
    sim = SmModel(SMALL, timing=EXACT)
    stream, flag = sim.stream(), sim.flag()
    with failing(LaunchError, field="flag", given=2):
        sim.set_flag(2, 1)
    with failing(LaunchError, field="flag", given=0):
        sim.launch(stream, kernel(np.arange(3), 0, 1))
    for epoch in (0, MOST_EPOCHS + 1):
        with failing(LaunchError, field="epoch", limit=4294967295):
            sim.launch(stream, kernel(np.arange(3), flag, epoch))
    with failing(LaunchError, field="blocks", given=2):
        sim.launch(stream, Kernel(3, 32, duration_ns=1, under=Under(flag, 1, np.arange(2))))
    with failing(LaunchError, field="cluster", given=2):
        sim.launch(stream, Kernel(2, 32, duration_ns=1, cluster=2, under=Under(flag, 1, np.arange(2))))
    with failing(LaunchError, field="under"):
        sim.program([kernel(np.arange(3), flag, 1)])
    running = sim.launch(stream, kernel(np.arange(3), flag, 1))
    with failing(LaunchError, field="handle", given=0):
        sim.take_left(running)
    plain = sim.launch(stream, Kernel(1, 32, duration_ns=1))
    with failing(LaunchError, field="left"):
        sim.left(plain)
    sim.run()
    assert len(sim.blocks()) == 4, "what was refused left nothing behind"


def test_there_may_be_many_flags() -> None:
    sim = SmModel(SMALL, timing=EXACT)
    flags = [sim.flag() for _ in range(200)]
    sim.set_flag(flags[-1], 1)
    kept, caught = (sim.launch(sim.stream(), kernel(np.arange(700), f, 1)) for f in (flags[63], flags[-1]))
    sim.run()
    assert len(sim.left(kept)) == 0
    assert len(sim.left(caught)) == 700
