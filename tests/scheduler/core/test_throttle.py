"""Requests that a limit or `admit` holds back: they keep no instance, delay nobody, and are not lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_bench import Bench, profile
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import Limits, new_state
from paellapy.scheduler.core.tenants import Tenant, client_key, client_numbers, find_client, set_tenant, tenant_stats
from paellapy.scheduler.policies.policy import attach_policy, find_policy, policy, policy_names

LATER_NS = 1e9


def oldest(job: Any) -> float:
    return job.arrival_ns


def not_client_1(job: Any) -> float:
    return LATER_NS if job.tenant == 1 else 1.0


def client_1_alone(job: Any, gpu: Any) -> bool:
    return job.tenant != 1 or gpu.active_jobs == 0


def only_model_1_of_client_1(job: Any) -> bool:
    return job.tenant != 1 or job.model == 1


holding = policy(name="holding", admit=not_client_1, may_idle=True)(oldest)
working = policy(name="working", admit=not_client_1)(oldest)


def clients_in_instances(bench: Bench) -> set[int]:
    rows = bench.state.slot[bench.state.slot >= 0]
    return set(bench.state.request["client"][rows].tolist())


@pytest.mark.parametrize("instances", [1, 2])
def test_other_clients_pass_the_jobs_of_a_held_back_client(instances):
    bench = Bench([profile(segments=1, batch=(1, 4), instances=instances)], policy=holding)
    held = [bench.submit(client=1, direct=True) for _ in range(20)]
    bench.step()
    for client in (2, 3, 2):
        other = bench.submit(client=client, direct=True)
        bench.step()
        assert clients_in_instances(bench) == {client}
        assert bench.finish(1000) == [other]
    assert not clients_in_instances(bench)
    assert bench.state.core["wake_at_ns"][0] == LATER_NS
    bench.step(int(LATER_NS))
    bench.run_dry()
    assert all(bench.status(each) == codes.OK for each in held)
    assert np.diff([bench.done[each]["finish_ns"] for each in held]).min() >= 0


def test_a_batch_holds_no_request_of_a_client_that_is_held_back():
    bench = Bench([profile(segments=1, batch=(1, 4), instances=1)], policy=holding)
    for client in (1, 2, 1, 2):
        bench.submit(client=client)
    bench.step()
    assert clients_in_instances(bench) == {2}
    assert len(bench.finish(1000)) == 2
    bench.step(int(LATER_NS))
    bench.run_dry()


def test_a_job_that_is_refused_before_its_launch_frees_its_instance():
    made = policy(admit=client_1_alone)(lambda job: job.tenant)  # client 1 comes first
    bench = Bench([profile("m", segments=2, batch=(1, 4), instances=1), profile("other", instances=2)], policy=made)
    bench.state.core["max_active"][0] = 1
    bench.submit(1, client=3)
    bench.step()
    bench.state.core["max_active"][0] = 4
    held = [bench.submit(client=1) for _ in range(2)]  # admitted only once nothing is active
    other = bench.submit(client=2)
    bench.step()
    assert clients_in_instances(bench) == {2, 3}
    assert tenant_stats(bench.state, 1)["held_back"] == 2
    bench.finish(1000)
    bench.run_dry()
    assert all(bench.status(each) == codes.OK for each in [*held, other])
    assert bench.done[other]["finish_ns"] <= bench.done[held[0]]["finish_ns"]


def test_released_requests_are_held_back_again_if_their_job_is_refused():
    def once(job: Any, own: Any) -> float:
        own.asked += job.tenant == 1
        return LATER_NS if job.tenant == 1 and own.asked > 1 else 1.0

    made = policy(name="once", admit=once, state={"asked": 0.0}, may_idle=True)(oldest)
    bench = Bench([profile(segments=1, batch=(1, 4), instances=1)], policy=made)
    held = [bench.submit(client=1) for _ in range(3)]
    bench.step()  # `admit` lets the batch pass into an instance, and refuses it there
    assert not clients_in_instances(bench)
    assert bench.state.core["wake_at_ns"][0] == LATER_NS
    other = bench.submit(client=2)
    bench.step()
    assert bench.finish(1000) == [other]
    bench.step(int(LATER_NS))
    bench.run_dry()
    assert all(bench.status(each) == codes.OK for each in held)


def test_a_client_that_is_held_back_for_one_model_runs_another():
    made = policy(admit=only_model_1_of_client_1, may_idle=True)(oldest)
    bench = Bench([profile("a", segments=1), profile("b", segments=1)], policy=made)
    held, other = bench.submit(0, client=1), bench.submit(1, client=1)
    bench.step()
    assert bench.finish(1000) == [other]
    bench.cancel(held)
    assert bench.step() == [held]


def test_an_idle_gpu_takes_the_best_job_of_all_clients():
    made = policy(admit=not_client_1)(lambda job: job.priority)
    bench = Bench([profile(segments=1, instances=1)], policy=made)
    last = bench.submit(client=1, priority=2)
    first = bench.submit(client=1, priority=1)
    bench.step()
    assert bench.finish(1000) == [first]
    assert bench.finish(1000) == [last]


def test_staged_inputs_come_back_into_the_instance():
    bench = Bench([profile(segments=1, batch=(1, 4), instances=1)], policy="fifo")
    s = bench.state
    s.model["n_inputs"][0], s.input_bytes[0, 0] = 1, 8
    slots = np.zeros((4, 1))
    s.input_address[s.model_instance[0, 0], 0] = slots.ctypes.data
    inputs = [np.array([float(k + 1)]) for k in range(3)]
    written = bench.submit(client=1, direct=True)  # into a slot, before the policy is changed
    attach_policy(s, holding)
    bench.step()
    assert clients_in_instances(bench) == {1}  # its inputs are nowhere else
    bench.cancel(written)
    held = [bench.submit(client=1, source=each.ctypes.data) for each in inputs]
    other = bench.submit(client=2, source=np.array([9.0]).ctypes.data)
    bench.step()
    assert bench.finish(1000) == [other]
    attach_policy(s, find_policy("fifo"))
    bench.step()
    assert slots[:3, 0].tolist() == [1.0, 2.0, 3.0]
    assert bench.finish(1000) == held


def test_a_limit_and_admit_hold_back_together():
    bench = Bench([profile(segments=1, ns=1e6, batch=(1, 4), instances=1)], policy=holding)
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    held = [bench.submit(client=1) for _ in range(9)]
    bench.step()
    assert tenant_stats(bench.state, 1)["held_back"] == 9
    bench.step(int(LATER_NS))
    bench.run_dry(ns=1_000_000)
    assert all(bench.status(each) == codes.OK for each in held)


@pytest.mark.parametrize("by_limit", [False, True])
def test_a_model_closes_once_its_last_held_back_request_is_cancelled(by_limit):
    bench = Bench([profile(segments=1, ns=1e6, instances=1)], policy="fifo" if by_limit else holding)
    if by_limit:
        set_tenant(bench.state, 1, "alice", Tenant(limit=0.001))
        bench.submit(client=1)
    held = bench.submit(client=1)
    bench.step()
    bench.finish(1_000_000)
    bench.tell(codes.CLOSE_MODEL, 0)
    bench.step()
    assert not bench.closed
    bench.cancel(held)
    bench.step()
    assert bench.status(held) == codes.CANCELLED
    assert bench.closed == [0]


def test_the_queue_of_a_client_that_is_held_back_refuses_only_that_client():
    bench = Bench([profile(segments=1, instances=1, queue_limit=2)], policy=holding)
    held = [bench.submit(client=1) for _ in range(6)]
    bench.step()
    refused = [each for each in held if each in bench.done]
    assert refused == held[-len(refused) :]
    assert {bench.status(each) for each in refused} == {codes.QUEUE_FULL}
    other = bench.submit(client=2)
    bench.step()
    assert bench.finish(1000) == [other]


@pytest.mark.parametrize("name", policy_names())
def test_no_policy_of_the_package_keeps_requests_out_of_instances(name):
    bench = Bench([profile()], policy=name)
    assert not bench.state.core["by_client"][0]
    bench.submit(direct=True)
    assert bench.unready == []  # the slot was claimed and written


submit = st.tuples(st.just("submit"), st.integers(0, 1), st.integers(0, 3))
others = st.tuples(st.sampled_from(["finish", "cancel", "step"]), st.integers(0, 40), st.just(0))


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(submit | submit | others, max_size=60),
    batch=st.sampled_from([(1,), (1, 4)]),
    instances=st.integers(1, 2),
    may_idle=st.booleans(),
)
def test_a_held_back_client_has_an_instance_only_on_an_idle_gpu(script, batch, instances, may_idle):
    made = holding if may_idle else working
    bench = Bench([profile(name, segments=2, batch=batch, instances=instances) for name in "ab"], policy=made)
    held = set()
    for action, first, client in script:
        if action == "submit" and bench.free:
            serial = bench.submit(first, client=client, direct=True)
            if client == 1:
                held.add(serial)
        elif action == "finish" and bench.running:
            bench.finish_segment(bench.running[first % len(bench.running)])
        elif action == "cancel":
            bench.cancel(first)
        bench.step(10)
        s = bench.state
        for instance in np.flatnonzero((s.slot >= 0).any(axis=1)):
            rows = s.slot[instance][s.slot[instance] >= 0]
            clients = set(s.request["client"][rows].tolist())
            if may_idle:
                assert 1 not in clients
            elif 1 in clients:  # the idle GPU has taken them
                assert s.instance["started_ns"][instance] < codes.NEVER
    for _ in range(400):  # all others are served, before the time of the client that is held back
        if set(bench.rows) <= held:
            break
        bench.finish(1000)
    assert set(bench.rows) <= held
    bench.step(int(LATER_NS))
    bench.run_dry()
    assert len(bench.done) == bench.serial


def test_functions_that_ask_about_clients_are_reached_only_under_policies_that_do():
    state = Bench([profile()], policy="fifo").state
    assert state.call["release_held_back"][0] == state.call["give_up_refused"][0] == 0
    attach_policy(state, holding)
    assert state.call["release_held_back"][0] != state.call["give_up_refused"][0] != 0
    assert state.call["release_held_back"][0] != 0


def test_requests_of_a_tenant_at_its_limit_stay_out_of_instances() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, batch=(1, 4))], policy="fifo")
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    first = [bench.submit(client=1, direct=True) for _ in range(12)]
    bench.step()
    assert [len(found) for found in slots_of(bench, 1)] == [4]  # a batch, in one instance
    assert len(bench.finish(1_000_000)) == 4
    assert not slots_of(bench, 1)
    other = bench.submit(client=2, direct=True)
    bench.step()
    assert bench.finish() == [other]
    bench.cancel(first[-1])
    bench.step()
    assert bench.status(first[-1]) == codes.CANCELLED
    assert bench.state.client["held_back"][1] == 7
    bench.run_dry(ns=1_000_000)
    assert len(bench.done) == 13


def test_a_short_queue_counts_only_held_back_requests_without_a_free_slot() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, queue_limit=0)], policy="fifo")
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    first = [bench.submit(client=1) for _ in range(3)]
    bench.step()
    assert [bench.done[each]["status"] for each in first if each in bench.done] == [codes.QUEUE_FULL]
    bench.run_dry(ns=1_000_000)
    assert [bench.status(each) for each in first] == [codes.OK, codes.OK, codes.QUEUE_FULL]


def test_released_requests_are_charged_at_a_captured_size() -> None:
    bench = Bench([profile(segments=1, ns=1e6, instances=2, batch=(1, 2, 4))], policy="fifo")
    later = bench.state.size[0, 1]
    later["segments"], later["total_ns"], later["capture"] = 0, 0.0, codes.LATER
    set_tenant(bench.state, 1, "alice", Tenant(limit=0.1))
    bench.submit(client=1)
    bench.submit(client=1)
    bench.step()
    assert bench.state.client["released_ns"][1] == pytest.approx(bench.state.size["total_ns"][0, 2])
    bench.run_dry(ns=1_000_000)


def test_a_client_has_one_number_for_all_producers():
    s = Bench([profile()]).state  # four clients: nobody, and three numbers
    found = [find_client(s.client_key, s.client, key) for key in (11, 22, 33, 22, 11)]
    assert sorted(set(found)) == [1, 2, 3]
    assert found[:2] == [found[4], found[3]]
    assert find_client(s.client_key, s.client, 44) in (1, 2, 3)


@given(st.lists(st.text(max_size=8) | st.integers(), max_size=12), st.integers(13, 40))
@settings(max_examples=30)
def test_a_clients_number_follows_from_its_name_and_the_earlier_names(names, clients):
    s = new_state(Limits(models=1, instances=1, requests=4, clients=clients))
    found = [find_client(s.client_key, s.client, client_key(name)) for name in names]
    numbers = client_numbers(map(str, names), clients)
    assert found == [numbers[str(name)] for name in names]


def slots_of(bench: Bench, client: int) -> list[list[int]]:
    """The requests of a client in each instance that has any."""
    s = bench.state
    rows = [
        [row for row in s.slot[instance] if row >= 0 and s.request["client"][row] == client] for instance in range(2)
    ]
    return [each for each in rows if each]
