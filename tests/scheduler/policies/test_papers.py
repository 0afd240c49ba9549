"""The published systems as policies, in simulated time: what each promises, on small workloads."""

from __future__ import annotations

from typing import Any

import pytest

from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, TraceWorkload, Workload

H200 = part("h200")
WARPS = H200.sms * H200.sm.warps


def model(
    name: str, segments: int = 8, us: float = 100.0, part: float = 0.7, compute: float = 0.0, memory: float = 0.0,
    **more: Any,
) -> ModelProfile:  # fmt: skip
    """Segments that take `part` of the SMs' places, and given parts of compute and memory."""
    warps = max(1, int(part * WARPS))
    each = SegmentProfile(
        us * 1e3, blocks=max(1, warps // 2), warps=warps, registers=0, compute=compute, memory=memory, kernels=4
    )
    return ModelProfile(name, {1: [each] * segments}, **{"instances": 2, **more})


def gpu_share(run: Results, name: str, seconds: float = 0.6) -> float:
    """A model's completed work, as time alone, divided by the time in which requests came. Held jobs end later."""
    number = [each.name for each in run.models].index(name)
    done = (run.jobs["model"] == number) & (run.jobs["status"] == OK) & (run.jobs["finish_ns"] <= seconds * 1e9)
    return float(done.sum()) * run.models[number].alone_ns() / (seconds * 1e9)


def loop(name: str, seconds: float = 0.6) -> Workload:
    return ClosedLoop(name, clients=2, duration=seconds)


LIMITS = [("token", "limit"), ("quota", "share"), ("antman", "performance")]


@pytest.mark.parametrize("limit", [0.1, 0.25, 0.5])
@pytest.mark.parametrize(("policy", "param"), LIMITS)
def test_limits_are_met_within_two_points(policy: str, param: str, limit: float) -> None:
    held = model("held", params={param: limit})
    alone = simulate([held], loop("held"), policy)
    assert gpu_share(alone, "held") == pytest.approx(limit, abs=0.02)
    free = model("free", params={param: 0.45} if policy == "quota" else {})
    both = simulate([held, free], loop("held") + loop("free"), policy)
    assert gpu_share(both, "held") == pytest.approx(limit, abs=0.02)
    assert gpu_share(both, "free") > 0.4


@pytest.mark.parametrize(("policy", "param"), LIMITS)
def test_who_comes_late_has_saved_nothing_up(policy: str, param: str) -> None:
    held, since, until = model("held", params={param: 0.25}), 0.3, 0.5
    requests = [(since, "held", None, None, 0)] * 150  # 120 ms of work: more than it may have in that time
    run = simulate([held], TraceWorkload(tuple(requests)), policy)
    done = float((run.jobs["finish_ns"] <= until * 1e9).sum()) * held.alone_ns() / 1e9
    assert done / (until - since) == pytest.approx(0.25, abs=0.01)


def test_shares_of_1_3_6_are_met() -> None:
    models = [model(name, share=share) for name, share in (("a", 1.0), ("b", 3.0), ("c", 6.0))]
    run = simulate(models, loop("a") + loop("b") + loop("c"), "fair")
    used = {name: gpu_share(run, name) for name in "abc"}
    total = sum(used.values())
    assert used["a"] / total == pytest.approx(0.1, abs=0.03)
    assert used["b"] / total == pytest.approx(0.3, abs=0.03)
    assert used["c"] / total == pytest.approx(0.6, abs=0.03)
    assert total > 0.9


def test_requests_are_guaranteed_where_all_want_more() -> None:
    wanted = {"a": 0.2, "b": 0.7}
    models = [model(name, params={"request": request}) for name, request in wanted.items()]
    run = simulate(models, loop("a") + loop("b"), "token")
    for name, request in wanted.items():
        assert gpu_share(run, name) >= request - 0.02


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("size", [0.3, 0.7])
def test_production_keeps_its_speed_under_tgs(clients: int, size: float) -> None:
    production, best_effort = model("production", part=0.5, priority=1), model("best_effort", part=size)
    load = ClosedLoop("production", clients=clients, duration=0.6)
    alone = gpu_share(simulate([production], load, "tgs"), "production")
    both = simulate([production, best_effort], load + loop("best_effort"), "tgs")
    assert gpu_share(both, "production") >= 0.95 * alone
    if clients == 1 and size < 0.5:  # two fill the GPU, and a larger segment does not fit beside production
        assert gpu_share(both, "best_effort") > 0.2
    free = simulate([production, best_effort], loop("best_effort"), "tgs")
    assert gpu_share(free, "best_effort") > 0.5  # with nobody to disturb, its rate grows


@pytest.mark.parametrize("size", [0.3, 0.9])
def test_best_effort_gets_the_time_that_production_leaves_under_tgs(size: float) -> None:
    production, best_effort = model("production", part=size, priority=1), model("best_effort", part=size, us=50.0)
    load = Poisson(0.3e9 / production.alone_ns(), "production", duration=0.6)
    runs = {name: simulate([production, best_effort], load + loop("best_effort"), name) for name in ("tgs", "priority")}
    share = {name: gpu_share(run, "best_effort") for name, run in runs.items()}
    late = {name: run.model("production").p99_ms for name, run in runs.items()}
    assert share["tgs"] >= 0.99 * share["priority"] > 0.5
    assert late["tgs"] <= 1.1 * late["priority"]
    if size < 0.5:  # both fit
        assert share["tgs"] > 1.1 * share["priority"]


@pytest.mark.parametrize("unlike", [True, False])
def test_orion_runs_best_effort_beside_what_is_unlike_it(unlike: bool) -> None:
    bound = {"memory": 0.8, "compute": 0.1} if unlike else {"memory": 0.1, "compute": 0.8}
    high = model("high", part=0.4, priority=1, **bound)
    low = model("low", part=0.4, us=70.0, compute=0.8, memory=0.1)
    load = Poisson(700, "high", duration=0.6) + loop("low")
    gate, orion = (simulate([high, low], load, name) for name in ("priority", "orion"))
    alone = simulate([high], Poisson(700, "high", duration=0.6), "priority").model("high").p99_ms
    gained = gpu_share(orion, "low") / gpu_share(gate, "low")
    if unlike:
        assert gained > 1.2
        assert orion.model("high").p99_ms <= 1.1 * alone
    else:
        assert gained == pytest.approx(1.0, abs=0.05)


def test_reef_pads_with_what_fits_and_ends_sooner() -> None:
    high = model("high", part=0.5, us=200.0, priority=1)
    load = Poisson(300, "high", duration=0.6) + loop("low")
    shares = {}
    for name, size in (("small", 0.3), ("large", 0.9)):
        low = model("low", part=size, us=50.0)
        gate, reef = (gpu_share(simulate([high, low], load, each), "low") for each in ("priority", "reef"))
        shares[name] = reef / gate
    assert shares["small"] > 1.1
    assert shares["large"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("later_s", "bound"), [(0.0103, True), (0.0703, False)])
def test_reef_bounds_what_is_in_flight_until_no_real_time_came_for_50_ms(later_s: float, bound: bool) -> None:
    high, low = model("high", segments=1, part=0.5, us=50.0, priority=1), model("low", segments=1000, instances=4)
    requests = [(0.0, "high", None, 1, 0), *[(1e-3, "low", None, 0, 0)] * 4, (later_s, "high", None, 1, 0)]
    waits = {}
    for each in ("priority", "reef"):
        jobs = simulate([high, low], TraceWorkload(tuple(requests)), each).jobs
        last = jobs[jobs["model"] == 0][-1]
        waits[each] = last["finish_ns"] - last["arrival_ns"] - 50e3
    assert waits["priority"] > 90e3, "best effort is in its way"
    assert (waits["reef"] < 0.5 * waits["priority"]) == bound


def test_tally_waits_until_high_priority_was_idle_for_a_while() -> None:
    high, low = model("high", part=0.5, us=50.0, priority=1), model("low")
    back_to_back = ClosedLoop("high", clients=1, think_ms=0.05, duration=0.3) + loop("low", 0.3)
    gate, tally = (simulate([high, low], back_to_back, name) for name in ("priority", "tally"))
    assert tally.model("high").p99_ms < gate.model("high").p99_ms


def test_offline_work_gets_what_online_work_leaves_under_muxflow() -> None:
    online, offline = model("online", part=0.3, priority=1), model("offline", part=0.3)
    found = []
    for rate in (250, 1000):  # 0.2 and 0.8 of the GPU's time
        run = simulate([online, offline], Poisson(rate, "online", duration=0.6) + loop("offline"), "muxflow")
        found.append(gpu_share(run, "offline"))
    assert found[0] == pytest.approx(0.8, abs=0.1)
    assert found[1] == pytest.approx(0.2, abs=0.1)


def test_pack_runs_at_once_what_fits() -> None:
    third = [model(name, part=0.3) for name in "abc"]
    run = simulate(third, loop("a") + loop("b") + loop("c"), "pack")
    assert sum(gpu_share(run, name) for name in "abc") > 2.0


def test_mlfq_lets_short_jobs_pass_without_knowing_them() -> None:
    short, long = model("short", segments=2), model("long", segments=60)
    load = Poisson(100, "short", duration=0.6) + loop("long")
    mlfq, fifo = (simulate([short, long], load, name, active=1) for name in ("mlfq", "fifo"))
    assert mlfq.model("short").p50_ms < 0.5 * fifo.model("short").p50_ms


def test_lax_makes_more_deadlines_than_fifo() -> None:
    tight, loose = model("tight", segments=2), model("loose", segments=20)
    load = Poisson(400, "tight", duration=0.6, deadline_ms=1.5) + Poisson(250, "loose", duration=0.6, deadline_ms=40)
    lax, fifo = (simulate([tight, loose], load, name, active=1) for name in ("lax", "fifo"))
    assert lax.all.within_target > fifo.all.within_target
