"""The SM model against the rules it claims to follow: what it schedules is read back from its block records."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_timing import EXACT, H200

from paellapy.instrument.errors import LaunchError, NoDeviceError
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.instrument.gpu_model.model import DeadlockError, SmModel
from paellapy.instrument.gpu_model.parts import KIB, Timing, occupancy
from paellapy.instrument.records import BLOCK, SM_LINE, WARP_SHIFT

pytestmark = pytest.mark.quick


# Four SMs in two GPCs: small enough that a handful of launches contend for everything.
SMALL = dataclasses.replace(H200, gpc_sms=(2, 2), concurrent_grids=8)


@dataclasses.dataclass(frozen=True)
class Launch:
    stream: int
    n_blocks: int
    threads: int
    registers: int
    shared: int
    duration: int
    submit: int


launches = st.builds(
    Launch,
    stream=st.integers(0, 4),
    n_blocks=st.integers(1, 60),
    threads=st.sampled_from([32, 100, 256, 512, 1024]),
    registers=st.sampled_from([16, 32, 40, 64]),
    shared=st.sampled_from([0, 1000, 40 * KIB, 110 * KIB, 227 * KIB]),
    duration=st.integers(1, 50),
    submit=st.integers(0, 200),
)
scripts = st.lists(launches, min_size=1, max_size=12).map(lambda script: sorted(script, key=lambda each: each.submit))
priorities = st.lists(st.integers(-2, 2), min_size=5, max_size=5)


def play(
    script: list[Launch], priority: list[int], *, work: bool = False
) -> tuple[SmModel, list[int]]:
    sim = SmModel(SMALL, timing=EXACT)
    for each in priority:
        sim.stream(each)
    handles = []
    for each in script:
        how = (
            {"cost": BlockCost(bytes=each.duration * 100, flops=each.duration * 300)}
            if work
            else {"duration_ns": each.duration}
        )
        handles.append(
            sim.launch(
                each.stream,
                Kernel(each.n_blocks, each.threads, each.registers, each.shared, **how),
                submit_ns=each.submit,
            )
        )
    return sim, handles


# --- invariants ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(scripts, priorities)
def test_alone_on_an_sm_a_kernel_reaches_its_theoretical_occupancy_and_never_more(
    script: list[Launch], priority: list[int]
):
    each = dataclasses.replace(script[0], n_blocks=32 * SMALL.sms)
    sim, _ = play([each], priority)
    sim.run()
    blocks = sim.blocks()
    expected = occupancy(SMALL, each.threads, each.registers, each.shared).blocks_per_sm
    first_wave = blocks[blocks["start_ns"] == each.submit]
    assert (np.bincount(first_wave["sm"], minlength=SMALL.sms) == expected).all()


@settings(max_examples=60, deadline=None)
@given(scripts, priorities, st.booleans())
def test_a_stream_runs_in_order(script: list[Launch], priority: list[int], work: bool):
    sim, handles = play(script, priority, work=work)
    sim.run()
    last: dict[int, float] = {}
    for handle, launch in zip(handles, script, strict=True):
        assert sim.start_ns(handle) >= max(launch.submit, last.get(launch.stream, 0))
        assert sim.start_ns(handle) <= sim.notify_ns(handle) < sim.finish_ns(handle)
        last[launch.stream] = sim.finish_ns(handle)


@settings(max_examples=40, deadline=None)
@given(scripts, priorities, st.booleans(), st.lists(st.integers(1, 97), min_size=1, max_size=5))
def test_running_step_by_step_changes_nothing(script: list[Launch], priority: list[int], work: bool, steps: list[int]):
    whole, handles = play(script, priority, work=work)
    whole.run()
    again, _ = play(script, priority, work=work)
    for k in range(2000):
        again.run(again.now_ns + steps[k % len(steps)])
        if again.next_event_ns == np.inf:
            break
    again.run()
    assert again.blocks().tobytes() == whole.blocks().tobytes()
    assert [again.finish_ns(k) for k in handles] == [whole.finish_ns(k) for k in handles]  # to the last bit


@settings(max_examples=40, deadline=None)
@given(scripts, priorities)
def test_submitting_when_the_time_comes_is_the_same_as_ahead(script: list[Launch], priority: list[int]):
    def once(ahead: bool) -> bytes:
        sim = SmModel(SMALL, timing=EXACT)
        for each in priority:
            sim.stream(each)
        for k, each in enumerate(script):
            # A time of its own: whole durations never bring another event there, which would be dealt with before.
            at = each.submit + (k + 1) / 1024
            if not ahead:
                sim.run(at)
            sim.launch(
                each.stream,
                Kernel(each.n_blocks, each.threads, each.registers, each.shared, duration_ns=each.duration),
                submit_ns=at,
            )
        sim.run()
        return sim.blocks().tobytes()

    assert once(ahead=True) == once(ahead=False)


@settings(max_examples=30, deadline=None)
@given(scripts, priorities, st.integers(0, 5))
def test_the_same_seed_gives_the_same_run(script: list[Launch], priority: list[int], seed: int):
    def once(seed: int) -> bytes:
        sim = SmModel(SMALL, seed, timing=dataclasses.replace(EXACT, jitter=0.3))
        streams = [sim.stream(each) for each in priority]
        for each in script:
            cost = BlockCost(bytes=each.duration * 100)
            sim.launch(
                streams[each.stream], Kernel(each.n_blocks, each.threads, each.registers, each.shared, cost=cost)
            )
        sim.run()
        return sim.blocks().tobytes()

    assert once(seed) == once(seed)


def test_another_seed_gives_other_durations_within_the_jitter():
    ends = []
    for seed in (1, 2):
        sim = SmModel(SMALL, seed, timing=dataclasses.replace(EXACT, jitter=0.1))
        sim.launch(sim.stream(), Kernel(64, 32, duration_ns=1000))
        sim.run()
        ends.append(sim.blocks()["end_ns"])
        assert 900 <= ends[-1].min() < 950 < 1050 < ends[-1].max() <= 1100
    assert (ends[0] != ends[1]).any()


# --- rates ---------------------------------------------------------------------------------------------------------


def alone_ns(cost: BlockCost, n_blocks: int = 132 * 8 * 20, **launch: object) -> float:
    sim = SmModel(H200, timing=EXACT)
    k = sim.launch(sim.stream(), Kernel(n_blocks, 256, 32, cost=cost, **launch), trace=False)  # type: ignore[arg-type]
    sim.run()
    return sim.finish_ns(k) - sim.start_ns(k)


def test_a_memory_bound_kernel_takes_bytes_over_bandwidth():
    n = 132 * 8 * 20
    assert alone_ns(BlockCost(bytes=50_000, flops=1000)) == pytest.approx(n * 50_000 / 4800, rel=0.01)


def test_a_compute_bound_kernel_takes_flops_over_peak():
    n = 132 * 8 * 20
    assert alone_ns(BlockCost(bytes=100, flops=1e6)) == pytest.approx(n * 1e6 / 66.9e3, rel=0.01)
    assert alone_ns(BlockCost(tensor_flops=1e7)) == pytest.approx(n * 1e7 / 989.4e3, rel=0.01)


def test_a_lone_block_is_bound_by_its_sm():
    assert alone_ns(BlockCost(bytes=1e6), n_blocks=1) == pytest.approx(1e6 / (64 * 1.98), abs=2)
    assert alone_ns(BlockCost(flops=1e6), n_blocks=1) == pytest.approx(1e6 * 132 / 66.9e3, abs=2)


@pytest.mark.parametrize("cost", [BlockCost(bytes=50_000), BlockCost(flops=1e6)])
def test_two_kernels_bound_by_the_same_thing_take_the_sum(cost: BlockCost):
    sim = SmModel(H200, timing=EXACT)
    n = 132 * 4 * 10
    pair = [sim.launch(sim.stream(), Kernel(n, 256, 64, 100 * KIB, cost=cost)) for _ in range(2)]
    sim.run()
    one = SmModel(H200, timing=EXACT)
    k = one.launch(one.stream(), Kernel(n, 256, 64, 100 * KIB, cost=cost))
    one.run()
    assert max(sim.finish_ns(each) for each in pair) == pytest.approx(2 * one.finish_ns(k), rel=0.01)


def test_kernels_bound_by_different_things_overlap():
    sim = SmModel(H200, timing=EXACT)
    n = 132 * 4 * 8
    # Four blocks of each fit an SM; the first kernel's grid is placed whole before the second's.
    memory = sim.launch(sim.stream(), Kernel(132 * 4, 256, 32, cost=BlockCost(bytes=n * 1000)))
    flops = sim.launch(sim.stream(), Kernel(132 * 4, 256, 32, cost=BlockCost(flops=n * 1000 * 66.9 / 4.8)))
    sim.run()
    alone = 132 * 4 * n * 1000 / 4800
    assert sim.finish_ns(memory) == pytest.approx(alone, rel=0.01)
    assert sim.finish_ns(flops) == pytest.approx(alone, rel=0.01)


def fluid_ends(sm: list[int], warps: list[int], amounts: list[int], bandwidth: float) -> list[float]:
    """When blocks that start together have received their bytes: the rule, integrated step by step."""
    now = 1.0
    ends = [now] * len(sm)
    left = {k: float(amount) for k, amount in enumerate(amounts) if amount > 0}
    while left:
        active = {sm[k] for k in left}
        per_sm = min(bandwidth / len(active), 64 * 1.98)
        weight = {each: sum(warps[k] for k in left if sm[k] == each) for each in active}
        rate = {k: per_sm * warps[k] / weight[sm[k]] for k in left}
        dt = min(left[k] / rate[k] for k in left)
        now += dt
        left = {k: amount - rate[k] * dt for k, amount in left.items()}
        for k in [k for k, amount in left.items() if amount < 1e-6]:
            ends[k] = now
            del left[k]
    return ends


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 8]), st.integers(0, 100_000)), min_size=1, max_size=20),
    st.sampled_from([100.0, 300.0, 4800.0]),
)
def test_sharing_follows_the_fluid_model(blocks: list[tuple[int, int]], bandwidth: float):
    gpu = dataclasses.replace(SMALL, bandwidth_gbps=bandwidth, concurrent_grids=128)
    sim = SmModel(gpu, timing=EXACT)
    for w, amount in blocks:
        sim.launch(sim.stream(), Kernel(1, w * 32, cost=BlockCost(bytes=amount)))
    sim.run()
    found = sim.blocks()
    assert (found["start_ns"] == 0).all()
    warps, amounts = zip(*blocks, strict=True)
    expected = fluid_ends(found["sm"].tolist(), list(warps), list(amounts), bandwidth)
    assert found["end_ns"].tolist() == pytest.approx(expected, abs=1.001)  # the records are rounded down


def test_measured_kernels_come_out_right():
    """The two measured kernels the default efficiencies stand for."""
    sim = SmModel(H200, timing=Timing())
    add = sim.launch(sim.stream(), Kernel(16384, 128, 32, cost=BlockCost(bytes=3 * 4096)))
    sim.run()
    assert sim.finish_ns(add) - sim.start_ns(add) == pytest.approx(48_000, rel=0.1)
    sim = SmModel(H200, timing=Timing())
    gemm = sim.launch(sim.stream(), Kernel(256, 256, 128, 100 * KIB, cost=BlockCost(tensor_flops=2 * 2048**3 / 256)))
    sim.run()
    assert sim.finish_ns(gemm) - sim.start_ns(gemm) == pytest.approx(27_000, rel=0.15)


def test_costs_may_differ_from_block_to_block():
    sim = SmModel(SMALL, timing=EXACT)
    sim.launch(sim.stream(), Kernel(3, 32, duration_ns=[5, 50, 500], first=7))
    sim.run()
    assert sim.blocks()[["block", "end_ns"]].tolist() == [(7, 5), (8, 50), (9, 500)]


# --- latencies, queues, events, copies -------------------------------------------------------------------------------


def test_a_launch_takes_its_latency_and_kernels_keep_their_gap():
    timing = dataclasses.replace(EXACT, launch_ns=5000, kernel_gap_ns=4000, graph_gap_ns=1000)
    sim = SmModel(SMALL, timing=timing)
    s, g = sim.stream(), sim.graph()
    k = [sim.launch(s, Kernel(1, 32, duration_ns=100), graph=graph) for graph in (0, 0, g, g, sim.graph())]
    sim.run()
    assert [sim.start_ns(each) for each in k] == [5000, 9100, 13200, 14300, 18400]


def test_the_front_end_starts_one_grid_after_the_other():
    sim = SmModel(SMALL, timing=dataclasses.replace(EXACT, grid_issue_ns=740))
    k = [sim.launch(sim.stream(), Kernel(1, 32, duration_ns=100)) for _ in range(3)]
    sim.run()
    assert [sim.start_ns(each) for each in k] == [0, 740, 1480]


def test_the_front_end_takes_the_most_urgent_grid_first():
    sim = SmModel(SMALL, timing=dataclasses.replace(EXACT, grid_issue_ns=740))
    k = [sim.launch(sim.stream(priority), Kernel(1, 32, duration_ns=100)) for priority in (-1, 0, 2, 0)]
    sim.run()
    assert [sim.start_ns(each) for each in k] == [2220, 740, 0, 1480]


def test_blocks_are_issued_one_after_the_other_to_the_sm_with_most_room():
    sim = SmModel(SMALL, timing=dataclasses.replace(EXACT, block_issue_ns=10))
    k = sim.launch(sim.stream(), Kernel(6, 256, duration_ns=1000))
    sim.run()
    assert sim.blocks()[["sm", "start_ns"]].tolist() == [(0, 0), (1, 10), (2, 20), (3, 30), (0, 40), (1, 50)]
    assert sim.notify_ns(k) == 50


def test_a_late_urgent_grid_goes_first_but_preempts_nothing():
    sim = SmModel(SMALL, timing=EXACT)
    low = sim.launch(sim.stream(), Kernel(12, 1024, duration_ns=100))  # two to an SM: 8 run, 4 wait
    high = sim.launch(sim.stream(priority=1), Kernel(8, 1024, duration_ns=10), submit_ns=50)
    sim.run()
    assert (sim.start_ns(high), sim.finish_ns(high), sim.finish_ns(low)) == (100, 110, 210)


def test_only_so_many_grids_run_at_once():
    sim = SmModel(dataclasses.replace(SMALL, concurrent_grids=2), timing=EXACT)
    k = [sim.launch(sim.stream(), Kernel(1, 32, duration_ns=100)) for _ in range(5)]
    sim.run()
    assert [sim.start_ns(each) for each in k] == [0, 0, 100, 100, 200]


@pytest.mark.parametrize(("false_dependencies", "expected"), [(False, 0), (True, 100)])
def test_streams_on_one_hardware_queue_wait_for_its_head(false_dependencies: bool, expected: int):
    sim = SmModel(SMALL, timing=EXACT, false_dependencies=false_dependencies, connections=1)
    a, b = sim.stream(), sim.stream()
    sim.launch(a, Kernel(1, 32, duration_ns=100))
    sim.launch(a, Kernel(1, 32, duration_ns=100))  # waits for the first, and holds up the queue
    other = sim.launch(b, Kernel(1, 32, duration_ns=100))
    sim.run()
    assert sim.start_ns(other) == expected


def test_an_event_orders_two_streams():
    sim = SmModel(SMALL, timing=EXACT)
    a, b = sim.stream(), sim.stream()
    early = sim.event()
    sim.wait(b, early)
    later = sim.launch(b, Kernel(1, 32, duration_ns=10))
    sim.launch(a, Kernel(1, 32, duration_ns=100))
    sim.record(a, early)
    sim.wait(a, sim.record(b))
    last = sim.launch(a, Kernel(1, 32, duration_ns=10))
    sim.run()
    assert (sim.start_ns(later), sim.start_ns(last)) == (100, 110)


def test_copies_share_an_engine_per_direction():
    sim = SmModel(H200, timing=dataclasses.replace(EXACT, copy_latency_ns=1000))
    up = [sim.copy(sim.stream(), 64_000, "h2d") for _ in range(2)]
    down = sim.copy(sim.stream(), 64_000, "d2h")
    kernel = sim.launch(0, Kernel(1, 32, duration_ns=10))
    sim.run()
    assert [sim.finish_ns(each) for each in (*up, down)] == [2000, 4000, 2000]
    assert sim.start_ns(kernel) == 2000
    assert sim.completed().tolist() == [up[0], down, kernel, up[1]]


def test_a_wait_for_what_nobody_records_is_a_deadlock():
    sim = SmModel(SMALL, timing=EXACT)
    s = sim.stream()
    sim.wait(s, sim.event())
    sim.launch(s, Kernel(1, 32, duration_ns=1))
    assert sim.run(1000) == 1000  # somebody may still record it
    with failing(DeadlockError, given=2, waits=[(s, "wait", 0, 0, -1)]):
        sim.run()


def test_a_cycle_of_waits_is_a_deadlock():
    sim = SmModel(SMALL, timing=EXACT)
    a, b = sim.stream(), sim.stream()
    x, y = sim.event(), sim.event()
    sim.wait(a, y)
    sim.record(a, x)
    sim.wait(b, x)
    sim.record(b, y)
    with failing(DeadlockError, given=4, waits=[(a, "wait", 0, y, b), (b, "wait", 2, x, a)]):
        sim.run()


# --- clusters ------------------------------------------------------------------------------------------------------


def test_a_cluster_that_fits_nowhere_is_refused():
    sim = SmModel(SMALL, timing=EXACT)
    with failing(LaunchError, field="cluster", given=4):
        sim.launch(sim.stream(), Kernel(4, 1024, 32, 200 * KIB, cluster=4, duration_ns=1))
    with failing(LaunchError, field="n_blocks", given=5):
        sim.launch(0, Kernel(5, 32, cluster=2, duration_ns=1))


# --- programs, records, long runs ----------------------------------------------------------------------------------


def test_a_program_runs_like_its_kernels_in_a_graph():
    timing = dataclasses.replace(EXACT, launch_ns=5000, kernel_gap_ns=4000, graph_gap_ns=1000)
    sim = SmModel(SMALL, timing=timing)
    kernels = [
        Kernel(9, 256, cost=BlockCost(bytes=1000), kernel=3),
        Kernel(2, 64, 40, 1000, duration_ns=[10, 20]),
        Kernel(100, 1024, cost=BlockCost(flops=5000)),
    ]
    program = sim.program(kernels)
    s = sim.stream()
    last = [sim.launch_program(s, program) for _ in range(3)]
    sim.run()
    assert sim.completed().tolist() == last
    plain = SmModel(SMALL, timing=timing)
    plain.stream()
    for _ in range(3):
        g = plain.graph()
        for k in kernels:
            plain.launch(0, k, graph=g)
    plain.run()
    assert sim.blocks().tobytes() == plain.blocks().tobytes()


def test_the_counters_count_blocks_and_warps_of_each_sm():
    lines = np.zeros(SMALL.sms, SM_LINE)
    sim = SmModel(SMALL, timing=EXACT, lines=lines)
    sim.launch(sim.stream(), Kernel(8, 256, duration_ns=100))
    sim.run(50)
    assert lines["started"].tolist() == [2 | 16 << WARP_SHIFT] * 4
    assert lines["ended"].tolist() == [0] * 4
    sim.run()
    assert lines["ended"].tolist() == [2 | 16 << WARP_SHIFT] * 4
    assert sim.blocks().dtype == BLOCK


def test_untraced_launches_leave_no_blocks_and_cleared_ones_are_gone():
    sim = SmModel(SMALL, timing=EXACT)
    s = sim.stream()
    sim.launch(s, Kernel(5000, 32, duration_ns=1), trace=False)
    first = sim.launch(s, Kernel(2, 32, duration_ns=1))
    second = sim.launch(s, Kernel(2, 32, duration_ns=[10, 100]), launch_id=77)
    while not sim.done(first):
        sim.run(sim.next_event_ns)
    sim.run(sim.next_event_ns + 20)
    sim.clear_blocks()
    assert sim.blocks()["launch"].tolist() == [77]
    sim.run()
    assert sim.blocks()["launch"].tolist() == [77, 77]
    assert sim.done(second)


def test_completions_come_step_by_step():
    sim = SmModel(SMALL, timing=EXACT)
    s = sim.stream()
    k = [sim.launch(s, Kernel(1, 32, duration_ns=10), report=report) for report in (True, False, True)]
    assert sim.next_event_ns == 0
    assert sim.run(stop_on_completion=True) == 10
    assert sim.completed().tolist() == [k[0]]
    assert sim.run(stop_on_completion=True) == 30
    assert sim.completed().tolist() == [k[2]]
    assert sim.completed().tolist() == []
    assert sim.next_event_ns == np.inf
    assert sim.run() == 30


def test_a_long_run_with_a_short_history_stays_small():
    sim = SmModel(SMALL, timing=EXACT, history=10)
    streams = [sim.stream() for _ in range(100)]
    handles = []
    for k in range(6000):
        handles.append(sim.launch(streams[k % 100], Kernel(2, 32, duration_ns=[k % 7 + 1, 5]), trace=False))
        sim.run(stop_on_completion=k % 3 == 0, until_ns=sim.now_ns + 1)
        sim.completed()
    sim.run()
    sim.check_integrity()
    assert len(sim._s.command) <= 2048
    assert len(sim._s.cost) <= 2048
    assert sim.done(handles[-1])
    with failing(LaunchError, field="handle", given=0):
        sim.done(handles[0])


def test_without_a_history_everything_is_kept():
    sim = SmModel(SMALL, timing=EXACT)
    streams = [sim.stream() for _ in range(70)]
    handles = [sim.launch(streams[k % 70], Kernel(1, 32, duration_ns=k % 5 + 1), submit_ns=k) for k in range(5000)]
    sim.run()
    assert [sim.start_ns(each) for each in handles[::100]] == [*range(0, 5000, 100)]
    assert len(sim.completed()) == 5000


# --- what is refused -----------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused():
    sim = SmModel(SMALL, timing=EXACT)
    s = sim.stream()
    with failing(LaunchError, field="shared memory", given=307200):
        sim.launch(s, Kernel(1, 32, 32, 300 * KIB, duration_ns=1))
    with failing(LaunchError, field="stream", given=5):
        sim.launch(5, Kernel(1, 32, duration_ns=1))
    with failing(LaunchError, field="priority", given=1000):
        sim.stream(1000)
    with failing(LaunchError, field="n_blocks", given=0):
        sim.launch(s, Kernel(0, 32, duration_ns=1))
    with failing(LaunchError, field="cost"):
        sim.launch(s, Kernel(1, 32))
    with failing(LaunchError, field="cost"):
        sim.launch(s, Kernel(1, 32, duration_ns=1, cost=BlockCost()))
    with failing(LaunchError, field="cost", limit=3):
        sim.launch(s, Kernel(3, 32, duration_ns=[1, 2]))
    with failing(LaunchError, field="cost", limit=3):
        sim.launch(s, Kernel(3, 32, duration_ns=-1))
    with failing(LaunchError, field="copy", given=(1, 'p2p')):
        sim.copy(s, 1, "p2p")  # type: ignore[arg-type]
    with failing(LaunchError, field="event", given=3):
        sim.wait(s, 3)
    with failing(LaunchError, field="event", given=0):
        sim.record(s, sim.record(s))
    with failing(LaunchError, field="kernels"):
        sim.program([])
    with failing(LaunchError, field="connections", given=33):
        SmModel(SMALL, false_dependencies=True, connections=33)
    with failing(LaunchError, field="lines", limit=4):
        SmModel(SMALL, lines=np.zeros(3, SM_LINE))
    sim.run(100)
    with failing(LaunchError, field="submit_ns", given=50):
        sim.launch(s, Kernel(1, 32, duration_ns=1), submit_ns=50)
    with failing(LaunchError, field="until_ns", given=50):
        sim.run(50)


def test_timing_comes_from_a_recorded_profile(tmp_path: Path):
    path = tmp_path / "h200.json"
    dataclasses.replace(Timing(), launch_ns=1234.5).save(path, device="H200")
    assert json.loads(path.read_text())["device"] == "H200"
    assert Timing.load(path).launch_ns == 1234.5
    path.write_text('{"timing": {"warp_ns": 1, "launch_ns": 2}}')
    with failing(NoDeviceError, field="timing", given=['warp_ns']):
        Timing.load(path)
    for field, given_ in (("launch_ns", -1), ("bandwidth_efficiency", 2), ("jitter", 1), ("sm_bytes_per_clock", 0)):
        with failing(ValueError, field=field, given=given_):
            Timing(**{field: given_})
