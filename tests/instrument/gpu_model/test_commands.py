"""Launches under a flag, and launches confined to an SM partition: which blocks run, and where."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_timing import EXACT, H200

from paellapy.instrument.errors import LaunchError
from paellapy.instrument.gpu_model.commands import Kernel, Under
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import KIB, footprint
from paellapy.instrument.records import MOST_EPOCHS

FOUR_SMS = dataclasses.replace(H200, gpc_sms=(2, 2), concurrent_grids=8)


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
    sim = SmModel(FOUR_SMS, timing=EXACT, seed=seed)
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
    sim = SmModel(FOUR_SMS, timing=EXACT)
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
    sim = SmModel(FOUR_SMS, timing=EXACT)
    flag = sim.flag()
    sim.set_flag(flag, 3)
    earlier, at, later = (sim.launch(sim.stream(), kernel(np.arange(5), flag, epoch)) for epoch in (2, 3, 4))
    sim.run()
    assert [len(sim.left(h)) for h in (earlier, at, later)] == [5, 5, 0]


def test_blocks_that_do_not_run_are_in_no_counter_and_no_trace() -> None:
    sim = SmModel(FOUR_SMS, timing=EXACT)
    flag = sim.flag()
    sim.set_flag(flag, 1)
    sim.launch(sim.stream(), kernel(np.arange(9), flag, 1))
    sim.run()
    assert not sim.lines["started"].any()
    assert len(sim.blocks()) == 0
    assert sim.use_until(sim.now_ns)[1].sum() == 0
    sim.check_integrity()


def test_what_a_flag_cannot_do_is_refused() -> None:
    sim = SmModel(FOUR_SMS, timing=EXACT)
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
    sim = SmModel(FOUR_SMS, timing=EXACT)
    flags = [sim.flag() for _ in range(200)]
    sim.set_flag(flags[-1], 1)
    kept, caught = (sim.launch(sim.stream(), kernel(np.arange(700), f, 1)) for f in (flags[63], flags[-1]))
    sim.run()
    assert len(sim.left(kept)) == 0
    assert len(sim.left(caught)) == 700


# Eight SMs in three uneven GPCs, so that partitions cut through them; two blocks of 1024 threads fill an SM.
SMALL = dataclasses.replace(H200, gpc_sms=(3, 2, 3), concurrent_grids=8)
SMS = SMALL.sms
LIMITS = np.array([SMALL.sm.threads, SMALL.sm.registers, SMALL.sm.shared_bytes, SMALL.sm.blocks])
GPC = np.repeat(np.arange(len(SMALL.gpc_sms)), SMALL.gpc_sms)
ALL = (0, SMS)


@dataclasses.dataclass(frozen=True)
class Launch:
    stream: int
    n_blocks: int
    threads: int
    registers: int
    shared: int
    duration: int
    submit: int
    partition: tuple[int, int] | None  # first SM and number of SMs
    cluster: int

    @property
    def sms(self) -> list[int]:
        return sms_of(*(self.partition or ALL))

    @property
    def need(self) -> np.ndarray:
        block = footprint(SMALL.sm, self.threads, self.registers, self.shared)
        return np.array([block.threads, block.registers, block.shared_bytes, 1])


def sms_of(first: int, n: int) -> list[int]:
    return sorted((first + k) % SMS for k in range(n))


def holds_its_cluster(launch: Launch) -> bool:
    fits = (LIMITS // np.maximum(launch.need, 1)).min()
    return int(np.bincount(GPC[launch.sms]).max() * fits) >= launch.cluster


ranges = st.tuples(st.integers(0, SMS - 1), st.integers(1, SMS))
launches = st.builds(
    Launch,
    stream=st.integers(0, 4),
    n_blocks=st.integers(1, 10).map(lambda n: 4 * n),
    threads=st.sampled_from([32, 1024, 1024, 100, 512]),  # few footprints, so that they come back
    registers=st.sampled_from([32, 32, 16, 64]),
    shared=st.sampled_from([0, 110 * KIB, 227 * KIB]),
    duration=st.integers(1, 50),
    submit=st.integers(0, 100),
    # A few that often meet (disjoint, overlapping, around the end), or any.
    partition=st.none() | st.sampled_from([(0, 4), (4, 4), (3, 2), (6, 4)]) | ranges,
    cluster=st.sampled_from([1, 1, 1, 2, 4]),
).filter(holds_its_cluster)
scripts = st.lists(launches, min_size=1, max_size=12).map(lambda script: sorted(script, key=lambda each: each.submit))
priorities = st.lists(st.integers(-1, 1), min_size=5, max_size=5)


def play(script: list[Launch], priority: list[int], *, work: bool = False) -> SmModel:
    sim = SmModel(SMALL, timing=EXACT)
    for each in priority:
        sim.stream(each)
    for each in script:
        how = {"cost": BlockCost(bytes=each.duration * 100)} if work else {"duration_ns": each.duration}
        kernel = Kernel(each.n_blocks, each.threads, each.registers, each.shared, cluster=each.cluster, **how)
        partition = sim.partition(*each.partition) if each.partition else 0
        sim.launch(each.stream, kernel, submit_ns=each.submit, partition=partition)
    sim.run()
    sim.check_integrity()
    return sim


# --- the rules once more, without a tree and without compiled code ---------------------------------------------------

Row = tuple[int, int, int, int, int]  # launch, block, SM, start, end


def choose(launch: Launch, free: np.ndarray) -> list[int]:
    """The SMs of the launch's next block, or of its next cluster's blocks; empty while there is no room."""
    room = {sm: int((free[sm] // np.maximum(launch.need, 1)).min()) for sm in launch.sms}
    if launch.cluster > 1:
        total = [sum(n for sm, n in room.items() if GPC[sm] == gpc) for gpc in range(len(SMALL.gpc_sms))]
        best = total.index(max(total))
        room = {sm: n for sm, n in room.items() if GPC[sm] == best}
    chosen: list[int] = []
    for _ in range(launch.cluster):
        fitting = [sm for sm, n in room.items() if n > chosen.count(sm)]
        if not fitting:
            return []
        chosen.append(min(fitting, key=lambda sm: (chosen.count(sm) * launch.need[0] - free[sm][0], sm)))
    return chosen


def schedule(script: list[Launch], priority: list[int]) -> list[Row]:
    free = np.tile(LIMITS, (SMS, 1))
    queued = {stream: [k for k, each in enumerate(script) if each.stream == stream] for stream in range(5)}
    unplaced = [each.n_blocks for each in script]
    running: list[Row] = []
    ended: list[Row] = []
    waiting: list[int] = []
    busy: dict[int, int] = {}  # which launch a stream runs
    now = 0
    while True:
        for row in [row for row in running if row[4] == now]:
            free[row[2]] += script[row[0]].need
            running.remove(row)
            ended.append(row)
        for stream, k in list(busy.items()):
            if not unplaced[k] and all(row[0] != k for row in running):
                del busy[stream]
        ready = [s for s, ks in queued.items() if ks and s not in busy and script[ks[0]].submit <= now]
        for stream in sorted(ready, key=lambda s: queued[s][0]):
            busy[stream] = queued[stream].pop(0)
            waiting.append(busy[stream])
        waiting.sort(key=lambda k: -priority[script[k].stream])  # stable: else first come, first served
        held = set()
        for k in list(waiting):
            each = script[k]
            if each.partition in held:
                continue
            while unplaced[k] and (chosen := choose(each, free)):
                for sm in chosen:
                    free[sm] -= each.need
                    running.append((k, each.n_blocks - unplaced[k], sm, now, now + each.duration))
                    unplaced[k] -= 1
            if not unplaced[k]:
                waiting.remove(k)
            elif each.partition is None:
                break
            else:
                held.add(each.partition)
        times = [row[4] for row in running]
        times += [script[ks[0]].submit for s, ks in queued.items() if ks and s not in busy]
        if not times:
            return sorted(ended)
        now = min(times)


@settings(max_examples=120, deadline=None)
@given(scripts, priorities)
def test_every_block_goes_where_the_rules_say(script: list[Launch], priority: list[int]):
    sim = play(script, priority)
    found = sim.blocks()[["launch", "block", "sm", "start_ns", "end_ns"]].tolist()
    assert sorted(found) == schedule(script, priority)


# --- where blocks run ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(scripts, priorities)
def test_blocks_stay_in_their_partition_and_no_sm_is_overfull(script: list[Launch], priority: list[int]):
    blocks = play(script, priority, work=True).blocks()
    for k, each in enumerate(script):
        mine = blocks[blocks["launch"] == k]
        assert len(mine) == each.n_blocks
        assert set(mine["sm"].tolist()) <= set(each.sms)
    needs = np.array([each.need for each in script])[blocks["launch"]]
    for at in np.unique(blocks["start_ns"]):
        resident = (blocks["start_ns"] <= at) & (blocks["end_ns"] > at)
        for sm in np.unique(blocks["sm"][resident]):
            assert (needs[resident & (blocks["sm"] == sm)].sum(axis=0) <= LIMITS).all()


@settings(max_examples=30, deadline=None)
@given(launches, st.integers(0, SMS - 1), st.booleans())
def test_a_partition_of_all_sms_is_like_none(launch: Launch, first: int, work: bool):
    free = dataclasses.replace(launch, partition=None)
    around = dataclasses.replace(launch, partition=(first, SMS))
    runs = [play([each], [0] * 5, work=work) for each in (free, around)]
    assert runs[0].blocks().tobytes() == runs[1].blocks().tobytes()


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("n_blocks", "partition", "start"), [(14, (0, 4), 2), (30, (0, 8), 100)])
def test_unconfined_blocks_see_what_others_took(cluster: int, n_blocks: int, partition: tuple[int, int], start: int):
    sim = SmModel(SMALL, timing=EXACT)
    sim.launch(sim.stream(), Kernel(1, 1024, duration_ns=100))  # the placement tree is for this footprint from now on
    sim.launch(
        sim.stream(),
        Kernel(n_blocks, 512, cluster=cluster, duration_ns=99),
        partition=sim.partition(*partition),
        submit_ns=1,
    )
    k = sim.launch(sim.stream(), Kernel(8, 1024, duration_ns=10), submit_ns=2)
    sim.run()
    sim.check_integrity()
    assert (sim.start_ns(k), sim.notify_ns(k)) == (start, start)
    if start == 2:
        assert set(sim.blocks()[-8:]["sm"].tolist()) == {4, 5, 6, 7}


# --- whom a full partition holds up
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [False, True])
def test_disjoint_partitions_do_not_delay_each_other(work: bool):
    # Flops have no limit but each SM's own, unlike bytes.
    how = {"cost": BlockCost(flops=1e5)} if work else {"duration_ns": 100}

    def ends(partitions: list[tuple[int, int]]) -> dict[tuple[int, int], list[float]]:
        sim = SmModel(SMALL, timing=EXACT)
        streams = [sim.stream() for _ in partitions]
        handles: dict[tuple[int, int], list[int]] = {each: [] for each in partitions}
        for n_blocks in (20, 3, 50):
            for stream, each in zip(streams, partitions, strict=True):
                handles[each].append(sim.launch(stream, Kernel(n_blocks, 1024, **how), partition=sim.partition(*each)))
        sim.run()
        return {each: [sim.finish_ns(handle) for handle in found] for each, found in handles.items()}

    left, right = (6, 3), (1, 5)
    assert ends([left, right]) == ends([left]) | ends([right])


def started(partition: tuple[int, int] | None) -> float:
    """Start time of a small grid behind one that waits for room in the left half, while the right half is empty."""
    sim = SmModel(SMALL, timing=EXACT)
    left = sim.partition(0, 4)
    sim.launch(sim.stream(), Kernel(7, 1024, duration_ns=100), partition=left)
    sim.launch(sim.stream(), Kernel(1, 1024, 32, 227 * KIB, duration_ns=100), partition=left, submit_ns=1)
    k = sim.launch(
        sim.stream(),
        Kernel(1, 32, duration_ns=10),
        partition=sim.partition(*partition) if partition else 0,
        submit_ns=2,
    )
    sim.run()
    return sim.start_ns(k)


def test_a_blocked_grid_holds_up_its_own_partition_only():
    assert started((0, 4)) == 100
    assert started((4, 4)) == 2
    assert started((3, 4)) == 2  # overlapping is not the same
    assert started(None) == 2


def test_a_blocked_unconfined_grid_holds_up_all_partitions():
    sim = SmModel(SMALL, timing=EXACT)
    sim.launch(sim.stream(), Kernel(8, 32, duration_ns=100))
    sim.launch(sim.stream(), Kernel(1, 1024, 32, 227 * KIB, duration_ns=100), submit_ns=1)  # wants an SM to itself
    k = sim.launch(sim.stream(), Kernel(1, 32, duration_ns=10), partition=sim.partition(4, 4), submit_ns=2)
    sim.run()
    assert sim.start_ns(k) == 100


def test_an_urgent_grid_goes_ahead_in_a_blocked_partition():
    sim = SmModel(SMALL, timing=EXACT)
    left = sim.partition(0, 1)
    sim.launch(sim.stream(), Kernel(1, 1024, duration_ns=100), partition=left)
    sim.launch(sim.stream(), Kernel(1, 1024, 32, 227 * KIB, duration_ns=100), partition=left, submit_ns=1)
    k = sim.launch(sim.stream(priority=1), Kernel(1, 32, duration_ns=10), partition=left, submit_ns=2)
    sim.run()
    assert sim.start_ns(k) == 2


# --- programs ------------------------------------------------------------------------------------------------------


def test_a_program_keeps_its_partition_however_it_is_launched():
    sim = SmModel(SMALL, timing=EXACT)
    partition = sim.partition(5, 2)
    program = sim.program([Kernel(9, 256, duration_ns=10), Kernel(8, 1024, cluster=4, duration_ns=20)], partition)
    s = sim.stream()
    last = sim.launch_program(s, program)
    placed = sim.placed(last - 1, last)
    sim.run()
    assert set(sim.blocks()["sm"].tolist()) == {5, 6}
    took, before = sim.now_ns, sim.lines["started"].copy()
    again = sim.again(placed, s, sim.now_ns)
    sim.run()
    sim.check_integrity()
    assert sim.finish_ns(again) == 2 * took
    assert (sim.lines["started"] == 2 * before).all()
    assert np.flatnonzero(before).tolist() == [5, 6]


def test_other_commands_are_not_confined_by_the_rows_they_reuse():
    sim = SmModel(SMALL, timing=EXACT, history=1)
    s, partition = sim.stream(), sim.partition(0, 1)
    for _ in range(3000):
        sim.launch(s, Kernel(1, 32, duration_ns=1), partition=partition, trace=False)
        sim.copy(s, 64, "h2d")
        sim.run()
        sim.completed()
    sim.launch(s, Kernel(SMS, 32, duration_ns=1))
    sim.run()
    sim.check_integrity()
    assert sim.blocks()["sm"].tolist() == [*range(SMS)]


def test_there_is_room_for_every_partition_and_each_has_one_number():
    sim = SmModel(H200, timing=EXACT)
    spans = [(first, n) for first in range(0, 132, 11) for n in range(1, 133, 10)]
    numbers = [sim.partition(*each) for each in spans]
    assert numbers == [*range(1, len(spans) + 1)]
    assert [sim.partition(*each) for each in spans] == numbers
    sim.launch(sim.stream(), Kernel(2, 1024, duration_ns=1), partition=sim.partition(121, 1))
    sim.run()
    assert sim.blocks()["sm"].tolist() == [121, 121]


# --- what is refused -----------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    sim = SmModel(SMALL, timing=EXACT)
    s = sim.stream()
    for first, n in ((0, 0), (0, 9), (-1, 2), (8, 1)):
        with failing(LaunchError, field="partition", given=(first, n), limit=8):
            sim.partition(first, n)
    partition = sim.partition(2, 2)  # one SM of each of two GPCs
    for unknown in (-1, 2):
        with failing(LaunchError, field="partition", given=unknown, limit=1):
            sim.launch(s, Kernel(1, 32, duration_ns=1), partition=unknown)
        with failing(LaunchError, field="partition", given=unknown):
            sim.program([Kernel(1, 32, duration_ns=1)], unknown)
    with failing(LaunchError, field="cluster", given=4):
        sim.launch(s, Kernel(4, 1024, cluster=4, duration_ns=1), partition=partition)
    with failing(LaunchError, field="cluster", given=4):
        sim.program([Kernel(4, 1024, cluster=4, duration_ns=1)], partition)
    sim.launch(s, Kernel(4, 1024, cluster=2, duration_ns=1), partition=partition)
    sim.run()
    confined = sim.program([Kernel(1, 32, duration_ns=1)], partition)
    other = SmModel(SMALL, timing=EXACT)
    with failing(LaunchError, field="partition", given=1):
        other.launch_program(other.stream(), confined)


def test_placement_in_partitions_and_clusters_is_reached_only_where_there_are_some():
    plain, partitions, clusters = (SmModel(H200, timing=EXACT) for _ in range(3))
    plain.launch(plain.stream(), Kernel(4, 128, duration_ns=10.0))
    partitions.partition(0, 8)
    clusters.launch(clusters.stream(), Kernel(4, 128, duration_ns=10.0, cluster=2))
    assert [bool(model._s.gpu["place_within"][0]) for model in (plain, partitions, clusters)] == [False, True, True]


@pytest.mark.parametrize(("n", "cluster"), [(8, 1), (0, 2), (16, 2)])
def test_a_program_of_another_model_is_placed_in_its_partition_and_clusters(n: int, cluster: int):
    """An engine measures a program on a model of its own before it launches the program."""
    made, other = SmModel(H200, timing=EXACT), SmModel(H200, timing=EXACT)
    partitions = [model.partition(0, n) if n else 0 for model in (made, other)]
    program = made.program([Kernel(4, 128, duration_ns=10.0, cluster=cluster)], partitions[0])
    last = other.launch_program(other.stream(), program)
    other.run()
    assert other.finish_ns(last) > 0
