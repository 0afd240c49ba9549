"""Every public argument of the simulator takes a valid value, or refuses it with an error that has its field."""

from __future__ import annotations

import functools
import math
from dataclasses import fields

import numpy as np
import pytest

import paellapy as pp
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.core.tenants import Tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.sim.chats import Chats, ChatTrace, language_profile
from paellapy.scheduler.sim.cluster import ClusterOptions, Failure, Straggler, simulate_cluster
from paellapy.scheduler.sim.plan import Fleet, plan
from paellapy.scheduler.sim.recorded_profiles import mix_profiles, training_profiles
from paellapy.scheduler.sim.simulate import SimulationOptions, simulate
from paellapy.scheduler.sim.tune import tune
from paellapy.scheduler.sim.workload import Background, ClosedLoop, Lognormal, Poisson, TraceWorkload

pytestmark = pytest.mark.quick

NEVER_VALID = [math.nan, -math.inf, 10**400, object(), 1 + 2j, b"x", np.float64("nan")]
SOMETIMES_VALID = [
    math.inf, 1e300, -1, -0.5, 0, -0.0, 2.5, 1e-320, True, "x", "x\ud800" * 500, 2**70, [], {}, {"net": 1}, [1],
    np.float32(1), np.int64(3), np.array([1, 2]), np.array(1.0),
]  # fmt: skip
NET = ModelProfile("net", {1: [SegmentProfile(50e3)]})
LOAD = Poisson(1000, "net", duration=0.002)
ROW = {"t": 0.0, "model": "net", "deadline": None, "priority": None, "client": "alice"}


def run(workload=LOAD, models=NET, policy="fifo", **options):
    return simulate(models, workload, policy, **options)


def cluster(profiles=NET, workload=LOAD, gpus=1, **options):
    return simulate_cluster(profiles, workload, gpus, **options)


def fleet(**options):
    given = {"profiles": NET, "rates": {"net": 100}, "gpus": 1, "memory_gb": {"net": 1}, "gpu_gb": 2} | options
    return Fleet(**given)


def tenant(**options):
    return run(Poisson(1000, "net", duration=0.002, client="alice"), tenants={"alice": options})


@functools.cache
def results():
    return run()


def names(kind, *more):
    return [each.name for each in fields(kind)] + list(more)


DOORS = {
    "simulate": (run, names(SimulationOptions, "models", "workload", "policy", "device")),
    "simulate_cluster": (cluster, names(ClusterOptions, "profiles", "workload")),
    "Poisson": (lambda **k: run(Poisson(**{"rate": 1000, "mix": "net", "duration": 0.002} | k)), names(Poisson)),
    "weights": (lambda **k: run(Poisson(1000, k, duration=0.002)), ["net"]),
    "Lognormal": (lambda **k: run(Lognormal(**{"rate": 1000, "mix": "net", "duration": 0.002} | k)), names(Lognormal)),
    "ClosedLoop": (lambda **k: run(ClosedLoop(**{"model": "net", "duration": 0.002} | k)), names(ClosedLoop)),
    "Background": (lambda **k: run(LOAD + Background(**{"model": "net"} | k)), names(Background)),
    "TraceWorkload": (lambda **k: run(TraceWorkload((tuple((ROW | k).values()),))), list(ROW)),
    "rows": (lambda rows: run(TraceWorkload(rows)), ["rows"]),
    "Failure": (lambda **k: cluster(gpus=2, failures=[Failure(**{"gpu": 0, "at_s": 0.001} | k)]), names(Failure)),
    "Straggler": (lambda **k: cluster(stragglers=[Straggler(**{"gpu": 0, "times": 2} | k)]), names(Straggler)),
    "SegmentProfile": (
        lambda **k: run(models=ModelProfile("net", {1: [SegmentProfile(**{"time_ns": 5e4} | k)]})),
        names(SegmentProfile),
    ),
    "ModelProfile": (
        lambda **k: run(models=ModelProfile(**{"name": "net", "sizes": {1: [SegmentProfile(5e4)]}} | k)),
        names(ModelProfile),
    ),
    "tune": (
        lambda **k: tune(**{"models": NET, "rates": {"net": 1000}, "seconds": 0.002, "iterations": 1} | k),
        ["models", "rates", "gpus", "policy", "device", "iterations", "patience", "seconds", "sigma", "seed"],
    ),
    "rates": (lambda **k: tune(NET, k, seconds=0.002, iterations=1), ["net"]),
    "pp.simulate": (lambda **k: pp.simulate(**{"models": NET, "workload": LOAD} | k), ["models", "workload", "trace"]),
    "mix_profiles": (mix_profiles, ["batch", "instances", "target", "names"]),
    "training_profiles": (lambda names: training_profiles(names), ["names"]),
    "Tenant": (tenant, names(Tenant)),
    "tuning": (lambda **k: run(tuning=k), ["demand_limit", "short_job_segments"]),
    "Tuning": (lambda part: Tuning.for_part(part), ["part"]),
    "Fleet": (fleet, names(Fleet)),
    "Chats": (lambda **k: Chats(**{"model": "8B", "rate": 9.0} | k), names(Chats)),
    "ChatTrace": (lambda **k: ChatTrace(**{"model": "8B", "rows": ((0.0, 9, 9),)} | k), names(ChatTrace)),
    "language_profile": (
        lambda **k: language_profile(**{"shape": "0.6B"} | k),
        ["shape", "ttft_ms", "tbt_ms", "kv_gb", "context", "sequences", "chunk"],
    ),
    "model": (lambda name: results().model(name), ["name"]),
    "tenant": (lambda name: results().tenant(name), ["name"]),
    "gpu_share": (lambda name: results().gpu_share(name), ["name"]),
    "columns": (lambda what: results().compare().columns(what), ["what"]),
    "compare": (lambda other: results().compare(other), ["other"]),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_value_is_used_or_refused_in_one_line_with_its_field(door):
    call, arguments = DOORS[door]
    for argument in arguments:
        for value in NEVER_VALID + SOMETIMES_VALID:
            refused = refusal(call, argument, value)
            if refused is None:
                assert not any(value is each for each in NEVER_VALID), (argument, value)
            else:
                assert getattr(refused, "field", None) or getattr(refused, "name", None), (argument, value)
                assert "\n" not in str(refused)
                assert len(str(refused)) < 500


@pytest.mark.parametrize(
    ("argument", "values"), [("current", [3, "ab", [1]]), ("seed", [-1, 1.5, "x"]), ("sure", [0, -1, math.nan, "x"])]
)
def test_a_plan_refuses_its_arguments_before_it_simulates(argument, values):
    for value in [*NEVER_VALID, *values]:
        assert refusal(lambda **k: plan(fleet(), **k), argument, value).field == argument


def refusal(call, argument, value):
    try:
        call(**{argument: value})
    except PaellaError as error:
        return error
    return None
