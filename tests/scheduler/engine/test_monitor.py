"""The look at a running engine: its numbers are those of the requests and blocks that ran."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from engine_models import mlp_model, random_inputs, scale_model

import paellapy as pp
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import part
from paellapy.instrument.records import WARP_SHIFT
from paellapy.instrument.traces.session import counts
from paellapy.scheduler.backends import virtual_loop
from paellapy.scheduler.engine import monitor as monitor_sms
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.monitor import EDGES_MS, Monitor
from paellapy.scheduler.policies.policy import PolicyError

RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def engine():
    with Engine("virtual:h200", quantum_us=5) as engine:
        engine.load(scale_model("scale", steps=4, target_ms=1000.0))
        engine.load(mlp_model("mlp"))
        yield engine


def ask(engine, name, count, **options):
    model = engine.models[name]
    for _ in range(count):
        engine.infer_sync(name, random_inputs(model, RNG), **options)


def model_of(snapshot, name):
    return next(each for each in snapshot["models"] if each["name"] == name)


def test_a_snapshot_is_plain_json_and_counts_what_ran(engine):
    with Monitor(engine) as monitor:
        ask(engine, "scale", 5)
        ask(engine, "mlp", 3)
        found = monitor.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(found))["device"] == engine.device.title
    scale, mlp = model_of(found, "scale"), model_of(found, "mlp")
    assert (scale["recent"], mlp["recent"]) == (5, 3)
    assert sum(scale["histogram"]) == 5
    assert len(scale["histogram"]) == len(EDGES_MS) + 1
    assert sum(size * n for size, n in scale["batches"].items()) == 5
    assert scale["target_ms"] == 1000.0
    assert 0 < scale["latency_ms"]["p50"] <= scale["latency_ms"]["p99"]
    assert mlp["target_ms"] is None
    assert mlp["within_target"] is None
    assert found["policy"]["current"] == engine.policy
    assert {"paella", "fifo"} <= {each["name"] for each in found["policy"]["choices"]}
    assert all(each["about"] for each in found["policy"]["choices"])


def test_nobody_who_looks_waits_for_the_compiler(monkeypatch):
    """The first start on a machine compiles for a minute; who looks meanwhile may be the server's event loop."""
    wanted, go_on = threading.Event(), threading.Event()

    def compile_when_told(*given):
        wanted.set()
        go_on.wait()

    monkeypatch.setattr(virtual_loop, "compile_for", compile_when_told)
    with Engine("virtual:h200") as engine:
        wanted.wait()
        try:
            with Monitor(engine) as monitor:
                assert monitor.snapshot()["models"] == []
                _, warp_ns, busy_ns = engine.sm_totals()
                assert not warp_ns.any()
                assert not busy_ns.any()
        finally:
            go_on.set()
        engine.load(scale_model("scale"))
        ask(engine, "scale", 1)
        assert engine.sm_totals()[1].any()


def test_the_occupancy_of_each_sm_is_that_of_the_blocks_that_ran(engine):
    monitor = Monitor(engine)
    with monitor, engine.trace() as t:
        before = engine.sm_totals()
        ask(engine, "mlp", 4)
        after = engine.sm_totals()
    warps = dict(zip(t.launches["launch"].tolist(), t.launches["warps"].tolist(), strict=True))
    per_sm = np.zeros(132)
    for block in t.blocks:
        per_sm[block["sm"]] += (block["end_ns"] - block["start_ns"]) * warps[int(block["launch"])]
    counted = after[1] - before[1]
    # Records are in whole nanoseconds, so each block may differ by one at either end.
    assert np.all(np.abs(counted - per_sm) <= 2 * 64 * (1 + np.bincount(t.blocks["sm"], minlength=132)))
    assert counted.sum() > 0
    assert after[0] > before[0]


def test_shares_of_time_are_shares(engine):
    with Monitor(engine) as monitor:
        ask(engine, "mlp", 2)
        sms = monitor.snapshot()["sms"]
        again = monitor.snapshot()["sms"]
    assert sms["source"] == "exact"
    assert len(sms["occupancy"]) == sms["count"] == 132
    assert all(0 <= o <= b <= 1 for o, b in zip(sms["occupancy"], sms["busy"], strict=True))
    assert max(sms["occupancy"]) > 0
    assert len(again["busy"]) == 132


def test_slow_requests_tell_when_they_waited_and_ran(engine):
    with Monitor(engine) as monitor:
        ask(engine, "mlp", 12, deadline_ms=60_000.0)
        ask(engine, "scale", 2, deadline_ms=60_000.0)
        slow = monitor.snapshot()["slow"]
    assert sorted(each["model"] for each in slow) == ["mlp"] * 4 + ["scale"] * 2
    assert [each["lateness"] for each in slow] == sorted((each["lateness"] for each in slow), reverse=True)
    for each in slow:
        edges = [time for segment in each["segments_ms"] for time in segment]
        assert edges
        assert edges == sorted(edges)
        assert 0 <= each["started_ms"] <= edges[0]
        assert edges[-1] <= each["latency_ms"]
        assert each["deadline_ms"] == pytest.approx(60_000.0, abs=1.0)


def test_a_request_has_the_segments_of_its_program_or_ran_whole(engine):
    pieces = len(engine.profile("mlp")[0].segments)
    assert pieces > 1
    for whole in (True, False):
        engine.state.core["whole_idle"][0] = whole  # whether a program alone on the GPU is one launch
        with Monitor(engine) as monitor:
            ask(engine, "mlp", 1)
            found = monitor.snapshot()["slow"][0]
        assert len(found["segments_ms"]) == (1 if whole else pieces)
        assert found["whole"] == whole
    engine.state.core["whole_idle"][0] = 1


def test_expired_requests_are_slow_ones_without_segments(engine):
    with Monitor(engine) as monitor:
        with pytest.raises(pp.PaellaError, match="deadline"):
            ask(engine, "mlp", 1, deadline_ms=1e-6)
        found = monitor.snapshot()
    assert model_of(found, "mlp")["expired"] == 1
    assert found["slow"][0]["status"] == "expired"
    assert found["slow"][0]["segments_ms"] == []


def test_nothing_is_watched_once_it_stops(engine):
    watchers = len(engine.core.ring.watchers)
    monitor = Monitor(engine)
    monitor.start()
    monitor.start()
    assert len(engine.core.ring.watchers) == watchers + 1
    monitor.stop()
    monitor.stop()
    assert len(engine.core.ring.watchers) == watchers


def test_it_switches_policies_and_finds_the_way_back_to_one_of_your_own(engine):
    @pp.policy
    def mine(job):
        return job.arrival_ns

    monitor = Monitor(engine)
    engine.set_policy(mine)
    monitor.set_policy("srpt")
    assert engine.policy == "srpt"
    assert "mine" in [each["name"] for each in monitor.snapshot()["policy"]["choices"]]
    monitor.set_policy("mine")
    assert engine.current_policy is mine
    with pytest.raises(PolicyError, match=r"no policy named 'nope': choose one of .*mine"):
        monitor.set_policy("nope")
    assert engine.policy == "mine"


def test_a_closed_engine_still_answers():
    with Engine("virtual:h200") as engine:
        engine.load(scale_model())
    assert Monitor(engine).snapshot()["state"] == "closed"


def test_the_sm_model_integrates_warps_over_time():
    sim = SmModel(part("h200"))
    k = sim.launch(sim.stream(), Kernel(132 * 4, threads=256, duration_ns=2000.0))
    sim.run()
    until, warp_ns, busy_ns = sim.use_until(1e9)
    assert until == 1e9
    assert warp_ns.sum() == pytest.approx(132 * 4 * 8 * 2000.0)
    assert busy_ns.max() <= sim.finish_ns(k) - sim.start_ns(k)


def test_time_beyond_the_next_event_is_not_known_yet():
    sim = SmModel(part("h200"))
    sim.launch(sim.stream(), Kernel(1, threads=64, duration_ns=2000.0))
    sim.run(sim.next_event_ns)
    while not sim.use_until(sim.now_ns + 500.0)[1].any():
        sim.run(sim.next_event_ns)
    next_ns = sim.next_event_ns
    assert sim.use_until(1e9)[0] == next_ns


def test_the_counters_of_a_device_have_the_blocks_of_its_engines_kernels(engine):
    with engine.trace() as t:
        ask(engine, "mlp", 4)
    assert not counts(engine.device).started.any(), "a trace begins anew, and its kernels write records"
    ask(engine, "mlp", 4)
    assert counts(engine.device).started.sum() == len(t.blocks) > 0


def test_of_a_real_gpu_only_kernels_that_report_tell_about_sms(engine, monkeypatch):
    """The virtual GPU stands in for one whose SMs nobody knows exactly; its own counters are those of `pp.kernel`."""
    monkeypatch.setattr(engine, "sm_totals", lambda: None)
    lines = np.zeros_like(engine.device.counts())
    monkeypatch.setattr(engine.device, "counts", lambda: lines)
    monitor = Monitor(engine)
    sms = monitor.snapshot()["sms"]
    assert (sms["source"], sms["occupancy"], sms["busy"]) == ("none", None, None)
    lines["started"][7] = 2 + (16 << WARP_SHIFT)  # two blocks of eight warps are on SM 7
    sms = monitor.snapshot()["sms"]
    assert sms["source"] == "sampled"
    assert sms["occupancy"] == [0.25 if sm == 7 else 0.0 for sm in range(132)]
    assert sms["busy"] == [1.0 if sm == 7 else 0.0 for sm in range(132)]


def test_what_a_sampler_saw_since_the_last_look_is_averaged(engine, monkeypatch):
    monkeypatch.setattr(engine, "sm_totals", lambda: None)
    lines = np.zeros_like(engine.device.counts())
    monkeypatch.setattr(engine.device, "counts", lambda: lines)
    monkeypatch.setattr(monitor_sms, "_PERIOD_S", 1e9)  # only what the test adds
    with Monitor(engine) as monitor:
        lines["started"][7] = 2 + (16 << WARP_SHIFT)
        full = counts(engine.device)
        lines["ended"][7] = lines["started"][7]
        for seen in (full, counts(engine.device), full, counts(engine.device)):
            monitor._sampler.add(seen)
        sms = monitor.snapshot()["sms"]
        assert sms["occupancy"][7] == 0.125
        assert sms["busy"][7] == 0.5
        assert sum(sms["busy"]) == 0.5
        assert sum(monitor.snapshot()["sms"]["busy"]) == 0  # since then nothing was seen: the counters as they are


def test_a_sampler_looks_by_itself_and_ends_with_its_monitor(engine, monkeypatch):
    monkeypatch.setattr(engine, "sm_totals", lambda: None)
    looked = threading.Event()
    monkeypatch.setattr(monitor_sms, "counts", lambda device: looked.set() or counts(device))
    with Monitor(engine) as monitor:
        sampler = monitor._sampler
        assert looked.wait(30)
    assert not sampler._thread.is_alive()
