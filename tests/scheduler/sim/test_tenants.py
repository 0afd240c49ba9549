"""Tenants in simulated time: shares, limits, names, and whose the GPU's time was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_models import together

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tenants import Tenant, client_numbers
from paellapy.scheduler.policies.policy import policy
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, TraceWorkload

pytestmark = pytest.mark.quick

SHARES = {"alice": 1.0, "bob": 3.0, "carol": 6.0}


def net(name: str = "net", us: float = 100.0, segments: int = 4, **more: Any) -> ModelProfile:
    return ModelProfile(name, {1: [SegmentProfile(us * 1e3, blocks=400, warps=3000)] * segments}, instances=6, **more)


def loops(*names: str, model: str | None = None, seconds: float = 0.4) -> Any:
    return together(*(ClosedLoop(model or name, clients=2, duration=seconds, client=name) for name in names))


@pytest.mark.parametrize("same", [True, False])
def test_shares_of_tenants_count_within_one_model_and_among_several(same: bool) -> None:
    models = [net()] if same else [net(name) for name in SHARES]
    load = loops(*SHARES, model="net" if same else None)
    run = simulate(models, load, "fair", tenants={name: Tenant(share=share) for name, share in SHARES.items()})
    for name, share in SHARES.items():
        assert run.gpu_share(name) == pytest.approx(share / 10, abs=0.03)


@pytest.mark.parametrize("sizes", [(1,), (1, 8)])
def test_a_client_that_comes_later_takes_turns_with_one_that_worked_alone(sizes: tuple[int, ...]) -> None:
    small = [SegmentProfile(1e5, blocks=400, warps=800)] * 4  # eight at once
    model = ModelProfile("net", dict.fromkeys(sizes, small), instances=16)
    burst = TraceWorkload(tuple((0.1, "net", None, None, "bob") for _ in range(600 * sizes[-1])))
    alone = ClosedLoop("net", clients=64 * sizes[-1], duration=0.2, client="alice")
    run = simulate([model], alone + burst, "paella")
    then = run.jobs[(run.jobs["finish_ns"] > 0.106e9) & (run.jobs["finish_ns"] < 0.12e9)]
    of_alice = float((then["client"] == run.clients.index("alice")).mean())
    assert of_alice == pytest.approx(0.5, abs=0.1)


def test_shares_of_models_do_not_depend_on_how_many_lengths_they_have() -> None:
    names = [f"texts[{n}]" for n in (8, 16, 32)]
    texts = [net(name, share=1.0, length_of="texts") for name in names]
    load = together(*(ClosedLoop(name, clients=4, duration=0.2) for name in (*names, "other")))
    run = simulate([*texts, net("other", share=1.0)], load, "fair")
    assert run.part_of_gpu("models", "other") == pytest.approx(0.5, abs=0.03)


def test_shares_of_models_do_not_depend_on_how_many_clients_ask() -> None:
    load = ClosedLoop("a", clients=4, duration=0.4) + Poisson(3000, "b", duration=0.4, clients=50)
    run = simulate([net("a"), net("b", queue_limit=100)], load, "fair")
    assert run.gpu_ms["models"]["a"] / run.gpu_ms["busy"][""] > 0.4


@pytest.mark.parametrize("policy", ["fair", "srpt", "token", "streams"])
@pytest.mark.parametrize("limit", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("contended", [True, False])
def test_limits_of_tenants_hold_under_every_policy(policy: str, limit: float, contended: bool) -> None:
    load = loops("held", "free") if contended else loops("held")
    run = simulate([net("held"), net("free")], load, policy, active=1, tenants={"held": {"limit": limit}})
    done = run.jobs[(run.jobs["client"] == 0) & (run.jobs["finish_ns"] <= 0.4e9)]
    had = len(done) * 400e3 / 0.4e9
    assert had <= limit + 0.02
    if not contended or policy == "fair":  # else the policy may give it less
        assert had >= limit - 0.02


@pytest.mark.parametrize("policy", ["fair", "fifo", "paella", "streams"])
def test_a_tenant_at_its_limit_does_not_delay_others_of_the_same_model(policy: str) -> None:
    batches = {n: [SegmentProfile((60 + 40 * n) * 1e3, blocks=400, warps=3000)] * 4 for n in (1, 2, 4, 8)}
    model = ModelProfile("net", batches, instances=3)
    light = Poisson(200, "net", duration=0.5, client="light")
    heavy = ClosedLoop("net", clients=40, duration=0.5, client="heavy")
    alone = simulate([model], light, policy).tenant("light")
    run = simulate([model], light + heavy, policy, tenants={"heavy": {"limit": 0.2}})
    assert run.tenant("light").completed == alone.completed
    # At most a batch of the other tenant is on the GPU, or in the same batch.
    assert run.tenant("light").p50_ms <= alone.p50_ms + 2 * 4 * 0.38
    had = run.gpu_ms["clients"]["heavy"]
    assert 0.16 * 500 <= had <= 0.27 * 500
    assert run.tenant("heavy").completed / had > 1.5 / 0.4  # it still gets batches


def test_a_tenant_that_admit_holds_back_does_not_delay_others_of_the_same_model() -> None:
    heavy_number = client_numbers(["heavy"], 256)["heavy"]

    def admit(job: Any) -> float:
        return 400e6 if job.tenant == heavy_number else 1.0

    @policy(admit=admit, may_idle=True)
    def patient(job: Any) -> float:
        return job.arrival_ns

    model = ModelProfile("net", {n: [SegmentProfile(1e5, blocks=400, warps=3000)] * 4 for n in (1, 8)}, instances=2)
    light = Poisson(200, "net", duration=0.35, client="light")
    heavy = ClosedLoop("net", clients=40, duration=0.5, client="heavy")
    run = simulate([model], light + heavy, patient, tenants={"heavy": {}})
    alone = simulate([model], light, patient)
    assert run.numbers["heavy"] == heavy_number
    # With jobs that wait, programs are launched in segments.
    assert run.tenant("light").p99_ms <= alone.tenant("light").p99_ms + 0.02
    done = run.jobs[run.jobs["client"] == run.clients.index("heavy")]
    assert done["started_ns"].min() == 400e6
    assert (done["status"] == OK).all()


def test_results_know_tenants_by_name() -> None:
    trace = TraceWorkload(tuple((0.001 * k, "net", None, None, who) for k, who in enumerate(("dora", 7, 0))))
    run = simulate([net()], loops("alice", model="net", seconds=0.01) + ClosedLoop("net", duration=0.01) + trace)
    assert set(run.clients) == {"alice", "client 2", "client 3", "7", "dora"}
    assert run.tenant("dora").completed == 1
    assert run.tenant("alice").completed + run.tenant("client 2").completed == run.all.completed - 3
    with failing(ArgumentError, field="client", given="eve"):
        run.tenant("eve")


def test_two_closed_loops_are_two_tenants() -> None:
    run = simulate([net()], ClosedLoop("net", duration=0.01) + ClosedLoop("net", duration=0.01))
    assert len(run.per_tenant) == 2


def test_a_tenant_that_nobody_is_called_is_refused() -> None:
    with failing(ArgumentError, field="tenants", given="eve"):
        simulate([net()], loops("alice", model="net"), tenants={"eve": Tenant(share=2)})
    with failing(ArgumentError, field="share", given=0):
        Tenant(share=0)
    with failing(ArgumentError, field="limit", given=2):
        Tenant(limit=2)


def test_runs_are_compared_side_by_side() -> None:
    first, second = (simulate([net("a"), net("b")], loops("a", "b", seconds=0.05), name) for name in ("fair", "fifo"))
    rows = first.compare(second).rows
    assert [row["policy"] for row in rows] == ["fair"] * 3 + ["fifo"] * 3
    assert [row["name"] for row in rows] == ["a", "b", "all"] * 2
    assert rows[3]["throughput_ratio"] == pytest.approx(rows[3]["throughput"] / rows[0]["throughput"])
    assert rows[5]["p99_ms"] == second.all.p99_ms
    assert "÷ first" in str(first.compare(second))
    with failing(ArgumentError, field="others"):
        first.compare([second])  # type: ignore[arg-type]


def test_a_client_called_like_a_model_is_not_taken_for_it() -> None:
    run = simulate([net("a"), net("b")], loops("a", model="a", seconds=0.02) + loops("a", model="b", seconds=0.02))
    parts = {row["name"]: row["gpu_share"] for row in run.compare().rows}
    assert parts["a"] == pytest.approx(run.gpu_ms["models"]["a"] / run.gpu_ms["busy"][""])
    assert parts["all"] == pytest.approx(parts["a"] + parts["b"]) == pytest.approx(1.0, abs=0.01)


@settings(max_examples=25, deadline=None)
@given(
    us=st.lists(st.floats(20, 400), min_size=1, max_size=3),
    policy=st.sampled_from(["fair", "srpt", "paella", "streams", "tgs", "token"]),
    seed=st.integers(0, 5),
)
def test_the_gpus_time_is_all_accounted_for(us: list[float], policy: str, seed: int) -> None:
    """What models and clients had adds up to the time in which something ran, by the simulated GPU's own account."""
    models = [net(f"m{k}", us=each) for k, each in enumerate(us)]
    load = together(*(Poisson(200, each.name, duration=0.05, client=f"c{k}") for k, each in enumerate(models)))
    run = simulate(models, load, policy, seed=seed, host_launch_ns=0.0)
    busy = run.gpu_ms["busy"][""]
    assert sum(run.gpu_ms["models"].values()) == pytest.approx(busy, rel=1e-6)
    assert sum(run.gpu_ms["clients"].values()) == pytest.approx(busy, rel=1e-6)
    running = intervals_ms(run)
    assert busy <= running * 1.03 + 0.01
    if policy == "streams":  # in one piece: nobody waits between segments
        assert busy == pytest.approx(running, rel=0.03)


def intervals_ms(run: Any) -> float:
    """Total time in which some request was started and not done."""
    began, ended = np.sort(run.jobs["started_ns"]), np.sort(run.jobs["finish_ns"])
    total, open_, last = 0, 0, 0
    for at, step in sorted([*((int(t), 1) for t in began), *((int(t), -1) for t in ended)]):
        total += (at - last) * (open_ > 0)
        open_, last = open_ + step, at
    return total / 1e6
