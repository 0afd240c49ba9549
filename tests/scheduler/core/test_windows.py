"""Windows of SMs: where many jobs share the GPU each keeps to some SMs; alone, it has all of them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from core_bench import LIMITS, Bench, profile
from engine_models import mlp_model, mlp_reference, random_inputs, scale_model, scale_reference
from hypothesis import given, settings
from hypothesis import strategies as some

import paellapy as pp
from paellapy.instrument.jit import compiled
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.check import IntegrityError, check_at_rest, check_integrity
from paellapy.scheduler.core.concurrency import fill_window
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.install import install, remove
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.loading import install_windows
from paellapy.scheduler.models.profile import ProgramProfile
from paellapy.scheduler.policies.policy import policy_names

TUNING = Tuning.for_part("h200")

DEVICE = "virtual:h200"
WINDOWS = 4

# --- in the core ----------------------------------------------------------------------------------------------------


def bench_with_windows(policy: str = "srpt", lanes: int = 4) -> Bench:
    bench = Bench([profile(lanes=lanes), profile("b", lanes=lanes), profile("c", lanes=lanes)], policy=policy)
    s = bench.state
    s.core["max_active"][0] = 16
    install_windows(s, [{(33 * k + i) % 132 for i in range(48)} for k in range(WINDOWS)])
    used = np.flatnonzero(s.lane["model"] >= 0)
    s.lane_window[used, 0], s.lane_window[used, 1] = used % WINDOWS, (used + WINDOWS // 2) % WINDOWS
    s.launch["handle"] = s.whole["handle"] = 1
    s.confined[used, :, :, 0], s.confined[used, :, :, 1] = 2, 3
    return bench


def windows_in_use(bench: Bench) -> list[int]:
    flight = bench.state.flight[: bench.state.core["flight"][0]]
    return sorted(int(w) for w in bench.state.lane["window"][flight])


def test_few_jobs_have_all_sms_and_more_are_spread_over_the_windows() -> None:
    bench = bench_with_windows()
    for k in range(TUNING.roomy_jobs):
        bench.submit(k % 3)
        bench.step()
    assert windows_in_use(bench) == [codes.NONE] * TUNING.roomy_jobs
    for k in range(WINDOWS):
        bench.submit(k % 3)
        bench.step()
        check_integrity(bench.state)
    found = windows_in_use(bench)
    assert found[:TUNING.roomy_jobs] == [codes.NONE] * TUNING.roomy_jobs
    for one in range(WINDOWS // 2):  # each went to the emptier of its two
        assert abs(found.count(one) - found.count(one + WINDOWS // 2)) <= 1
    assert bench.state.core["confined_launches"][0] >= WINDOWS
    bench.run_dry()
    assert not bench.state.window_load.any()


@pytest.mark.parametrize(("windows", "long", "pieces"), [(WINDOWS, 1, 1), (WINDOWS, 6, 2), (0, 1, 2)])
def test_few_short_jobs_go_in_one_piece_where_there_are_windows(windows: int, long: int, pieces: int) -> None:
    models = [profile(segments=3 * long, lanes=4), profile("b", segments=3 * long, lanes=4)]
    bench = Bench(models, policy="srpt", limits=replace(LIMITS, segments=32))
    bench.state.core["windows"][0] = windows
    bench.state.confined[...] = 1
    for k in range(2):
        bench.submit(k)
        bench.step()
    first, second = bench.state.flight[: bench.state.core["flight"][0]]
    assert bench.state.lane["whole"][first]  # alone
    assert bench.state.lane["issued"][second] == pieces
    assert bench.state.lane["whole"][second] == (pieces == 1)
    bench.run_dry()


def window_of_stream(bench: Bench, lane: int) -> int:
    at = bench.state.lane["stream_at"][lane]
    return int(at - codes.OF_WINDOWS) // codes.QUEUES if at >= codes.OF_WINDOWS else codes.NONE


@pytest.mark.parametrize(("fuller", "moves"), [(0, False), (int(48 * TUNING.staying_jobs) - 1, False), (48, True)])
def test_a_job_stays_with_its_stream_and_its_window_unless_another_is_much_emptier(fuller: int, moves: bool) -> None:
    bench = bench_with_windows()
    s = bench.state
    for k in range(TUNING.roomy_jobs + 2):
        bench.submit(k % 3)
    bench.step()
    flight = s.flight[: s.core["flight"][0]].tolist()
    for lane in flight:
        assert window_of_stream(bench, lane) == s.lane["window"][lane]
    assert (s.stream_jobs <= 1).all()  # each in a hardware queue of its own
    lane = next(each for each in flight if s.lane["window"][each] >= 0 and s.lane["issued"][each] > 1)
    here, stream = int(s.lane["window"][lane]), int(s.lane["stream_at"][lane])
    there = next(int(w) for w in s.lane_window[lane, :2] if w != here)
    s.window_load[:WINDOWS] = 100 + s.overlap[here, :WINDOWS]  # as if as many were everywhere, and the lane here
    s.window_load[here] += fuller
    bench.finish_segment(lane)
    with pytest.raises(IntegrityError, match="windows"):  # that load is made up
        bench.step()
    assert s.lane["flight_at"][lane] >= 0
    assert s.lane["stream_at"][lane] == stream
    assert s.lane["window"][lane] == (there if moves else here)


@compiled
def fill(state: State, window: int, change: int) -> None:
    fill_window(state, window, change)


def test_windows_that_share_sms_fill_each_other() -> None:
    state = bench_with_windows().state
    assert state.overlap[0, :WINDOWS].tolist() == [48, 15, 0, 15]
    fill(state, 3, 1)
    assert state.window_load[:WINDOWS].tolist() == [15, 0, 15, 48]
    fill(state, 3, -1)
    assert not state.window_load.any()


@pytest.mark.parametrize(("policy", "confinable"), [("streams", True), ("srpt", False)])
def test_all_sms_are_for_what_hardware_orders_and_what_cannot_be_confined(policy: str, confinable: bool) -> None:
    bench = bench_with_windows(policy)
    bench.state.confined[...] *= confinable
    for k in range(12):
        bench.submit(k % 3)
    bench.step()
    assert windows_in_use(bench) == [codes.NONE] * 12
    bench.run_dry()


def test_a_model_that_takes_the_rows_of_another_does_not_take_its_windows() -> None:
    bench = bench_with_windows()
    for m in range(3):
        bench.tell(codes.CLOSE_MODEL, m)
    bench.step()
    for m in range(3):
        remove(bench.state, m)
    _, lanes = install(bench.state, profile("later", lanes=4))
    assert (bench.state.lane_window[lanes] == codes.NONE).all()
    assert not bench.state.confined[lanes].any()


@given(some.lists(some.tuples(some.integers(0, 2), some.booleans()), max_size=40))
@settings(max_examples=40, deadline=None)
def test_jobs_in_windows_are_counted_whatever_happens(events: list[tuple[int, bool]]) -> None:
    bench = bench_with_windows()
    for model, finish in events:
        if finish:
            flight = bench.state.flight[: bench.state.core["flight"][0]]
            if len(flight):
                bench.finish_segment(int(flight[0]))
        elif bench.free:
            bench.submit(model)
        bench.step(1000)
        check_integrity(bench.state)
    bench.run_dry()
    assert not bench.state.window_load.any()
    assert (bench.state.lane["window"] == codes.NONE).all()


# --- which programs are confined --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window_ns", "confined"), [(0.0, False), (100.0, True), (130.0, True), (200.0, False)])
def test_a_program_is_confined_if_that_hardly_slows_it(window_ns: float, confined: bool) -> None:
    profile = ProgramProfile(1, ((0, 1),), (), 100.0, {}, True, window_ns=window_ns)
    assert (profile.stretch_in_window <= TUNING.most_window_stretch) is confined


# --- on the virtual GPU -----------------------------------------------------------------------------------------------

KINDS = {
    "short": (scale_model("short", 3.0, batch=(1, 4)), scale_reference(3.0)),
    "long": (scale_model("long", 2.0, steps=30, batch=(1, 2)), scale_reference(2.0, 30)),
    "mlp": (mlp_model("mlp", batch=(1, 2, 4)), mlp_reference()),
}


@pytest.fixture(scope="module")
def loaded():
    with Engine(DEVICE, quantum_us=10, sm_windows=8) as engine:
        for model, _ in KINDS.values():
            engine.load(model)
        yield engine


@pytest.mark.parametrize("name", policy_names())
def test_every_answer_is_right_with_windows_under_every_policy(loaded, name):
    loaded.set_policy(name)
    rng = np.random.default_rng(1)
    work = [(str(kind), random_inputs(KINDS[kind][0], rng)) for kind in rng.choice(list(KINDS), 60)]

    async def main():
        return await asyncio.gather(*(loaded.infer(kind, inputs) for kind, inputs in work))

    for (kind, inputs), outputs in zip(work, asyncio.run(main()), strict=True):
        for key, value in KINDS[kind][1](inputs).items():
            np.testing.assert_allclose(outputs[key], value, rtol=1e-4, atol=1e-6)
    check_at_rest(loaded.state)


def spans(engine, trace):
    """For each launch, the number of adjacent SMs, counted cyclically, that hold all of its blocks."""
    n = engine.device.sm_count
    for launch in np.unique(trace.blocks["launch"]):
        on = np.unique(trace.blocks["sm"][trace.blocks["launch"] == launch])
        yield n - int(np.diff(np.append(on, on[0] + n)).max()) + 1


def test_blocks_keep_to_their_windows_in_a_crowd_and_to_nothing_alone():
    """Seen in traces: blocks of one job at a time are on more SMs than a window has."""
    wide = scale_model("wide", steps=40, n=128 * 100, batch=(1,), lanes=12)
    with Engine(DEVICE, "srpt", quantum_us=10, max_active=12, sm_windows=8) as engine:
        engine.load(wide)
        assert engine.profile("wide")[0].stretch_in_window <= TUNING.most_window_stretch
        x = random_inputs(wide, np.random.default_rng(2))

        async def crowd(n):
            await asyncio.gather(*(engine.infer("wide", x) for _ in range(n)))

        with engine.trace() as alone:
            engine.infer_sync("wide", x)
        with engine.trace() as together:
            asyncio.run(crowd(12))
        window = math.ceil(TUNING.window_share * engine.device.sm_count)
        assert min(spans(engine, alone)) > window
        assert min(spans(engine, together)) <= window < max(spans(engine, together))
        assert 0 < engine.stats()["confined_launches"] < engine.stats()["launches"]
        check_at_rest(engine.state)


def test_there_are_windows_only_where_they_are_asked_for():
    with Engine(DEVICE) as engine:
        engine.load(KINDS["short"][0])
        assert (engine.state.lane_window == codes.NONE).all()
        assert engine.profile("short")[0].window_ns == 0.0


@pytest.mark.parametrize("wrong", [-1, 1, 2, 65])
def test_a_number_of_windows_that_cannot_be_is_refused(wrong):
    with pytest.raises(ModelError, match="sm_windows"):
        pp.Engine(DEVICE, sm_windows=wrong)


def test_segments_are_longer_with_windows_unless_said_otherwise():
    def segments(**how):
        with Engine(DEVICE, **how) as engine:
            engine.load(scale_model(steps=60, batch=(1,), n=1 << 20, lanes=1))
            return len(engine.profile("scale")[0].segments)

    assert segments(quantum_us=100) == segments() > segments(sm_windows=8) == segments(quantum_us=150)
