"""The published systems as policies, each on a small workload that shows its purpose. Simulated time, no GPU.

    python benchmarks/systems.py

Models are synthetic: eight segments of 100 µs that take a given part of the SMs' places, of compute and of memory. So
the figures show that a policy does what its paper describes, not how much a real pair of models gains by it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from common import save

from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, Workload

SEEDS = range(5)
SECONDS = 1.0
H200 = part("h200")
WARPS = H200.sms * H200.sm.warps


def model(
    name: str, segments: int = 8, us: float = 100.0, part: float = 0.7, compute: float = 0.0, memory: float = 0.0,
    **more: Any,
) -> ModelProfile:  # fmt: skip
    warps = max(1, int(part * WARPS))
    each = SegmentProfile(
        us * 1e3, blocks=max(1, warps // 2), warps=warps, registers=0, compute=compute, memory=memory, kernels=4
    )
    return ModelProfile(name, {1: [each] * segments}, instances=2, **more)


def loop(name: str) -> Workload:
    return ClosedLoop(name, clients=2, duration=SECONDS)


def gpu_share(run: Results, name: str) -> float:
    """Time alone of all that a model completed while requests came, of that time. What is held back ends later."""
    number = [each.name for each in run.models].index(name)
    done = (run.jobs["model"] == number) & (run.jobs["status"] == OK) & (run.jobs["finish_ns"] <= SECONDS * 1e9)
    return float(done.sum()) * run.models[number].alone_ns() / (SECONDS * 1e9)


def over_seeds(measure: Callable[[int], float]) -> dict[str, float]:
    found = [measure(seed) for seed in SEEDS]
    return {"mean": round(statistics.mean(found), 3), "least": round(min(found), 3), "most": round(max(found), 3)}


def limits(policy: str, param: str) -> dict[str, Any]:
    """What a model gets that is held to 0.1, 0.25 and 0.5: alone, and beside one that is not."""
    found: dict[str, Any] = {}
    for limit in (0.1, 0.25, 0.5):
        held = model("held", params={param: limit} | ({"request": limit} if policy == "token" else {}))
        free = model("free", params={param: 0.45} if policy == "quota" else {})
        alone = simulate([held], loop("held"), policy)
        both = simulate([held, free], loop("held") + loop("free"), policy)
        found[str(limit)] = {
            "alone": round(gpu_share(alone, "held"), 3),
            "contended": round(gpu_share(both, "held"), 3),
            "the other": round(gpu_share(both, "free"), 3),
        }
    return found


def fair() -> dict[str, float]:
    models = [model(name, share=share) for name, share in (("a", 1.0), ("b", 3.0), ("c", 6.0))]
    run = simulate(models, loop("a") + loop("b") + loop("c"), "fair")
    total = sum(gpu_share(run, name) for name in "abc")
    return {name: round(gpu_share(run, name) / total, 3) for name in "abc"}


def by_tenant() -> dict[str, float]:
    """The same shares as those of tenants that ask for one model."""
    shares = {"a": 1.0, "b": 3.0, "c": 6.0}
    # So many of each that some of its requests always wait; so long that those of the end hardly count.
    a, b, c = (ClosedLoop("net", clients=6, duration=3 * SECONDS, client=name) for name in shares)
    net = replace(model("net"), instances=6)
    run = simulate([net], a + b + c, "fair", tenants={name: {"share": share} for name, share in shares.items()})
    return {name: round(run.gpu_share(name), 3) for name in shares}


def tenant_limits() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for limit in (0.1, 0.25, 0.5):
        models, tenants = [model("held"), model("free")], {"held": {"limit": limit}}
        held = ClosedLoop("held", clients=2, duration=SECONDS, client="held")
        both = simulate(models, held + loop("free"), "fair", tenants=tenants)
        alone = simulate(models, held, "fair", tenants=tenants)
        found[str(limit)] = {
            "alone": round(gpu_share(alone, "held"), 3), "contended": round(gpu_share(both, "held"), 3)
        }  # fmt: skip
    return found


def tgs() -> dict[str, Any]:
    """Production that takes half of the SMs' places, one request at a time, beside small and large best effort."""
    found: dict[str, Any] = {}
    production = model("production", part=0.5, priority=1)
    load = ClosedLoop("production", clients=1, duration=SECONDS)
    for size in (0.3, 0.7):
        best_effort = model("best_effort", part=size)
        for name in ("tgs", "priority", "streams"):
            alone = gpu_share(simulate([production], load, name), "production")
            run = simulate([production, best_effort], load + loop("best_effort"), name)
            found[f"{name}, best effort of {size}"] = {
                "production, of alone": round(gpu_share(run, "production") / alone, 3),
                "best effort": round(gpu_share(run, "best_effort"), 3),
            }
    return found


def beside(policy: str, high: ModelProfile, low: ModelProfile, rate: float) -> dict[str, Any]:
    """High priority in an open loop beside best effort in a closed one: its p99, and what the other gets, of alone."""
    load = Poisson(rate, "high", duration=SECONDS)

    def stretch(seed: int) -> float:
        alone = simulate([high], load, policy, seed=seed).model("high").p99_ms
        return simulate([high, low], load + loop("low"), policy, seed=seed).model("high").p99_ms / alone

    def gets(seed: int) -> float:
        alone = gpu_share(simulate([low], loop("low"), policy), "low")
        return gpu_share(simulate([high, low], load + loop("low"), policy, seed=seed), "low") / alone

    return {"p99 ÷ alone": over_seeds(stretch), "best effort, of alone": over_seeds(gets)}


def pairs(policy: str) -> dict[str, Any]:
    found = {}
    for kind, bound in (("unlike", {"memory": 0.8, "compute": 0.1}), ("like", {"memory": 0.1, "compute": 0.8})):
        high = model("high", part=0.4, priority=1, **bound)
        low = model("low", part=0.4, us=70.0, compute=0.8, memory=0.1)
        found[kind] = {name: beside(name, high, low, 700) for name in ("priority", policy)}
    return found


def padding() -> dict[str, Any]:
    high = model("high", part=0.5, us=200.0, priority=1)
    low = model("low", part=0.3, us=50.0)
    return {name: beside(name, high, low, 300) for name in ("priority", "reef", "streams")}


def tally() -> dict[str, Any]:
    high, low = model("high", part=0.5, us=50.0, priority=1), model("low", us=50.0)
    return {name: beside(name, high, low, 300) for name in ("priority", "tally", "streams")}


def muxflow() -> dict[str, Any]:
    online, offline = model("high", part=0.3, priority=1), model("low", part=0.3)
    return {f"online {used}": beside("muxflow", online, offline, used * 1250) for used in (0.2, 0.8)}


def short_beside_long() -> dict[str, float]:
    short, long = model("short", segments=2), model("long", segments=60)
    load = Poisson(100, "short", duration=SECONDS) + loop("long")
    runs = {name: simulate([short, long], load, name, active=1) for name in ("mlfq", "fifo", "srpt")}
    return {f"{name}: p50 ms of the short one": round(run.model("short").p50_ms, 2) for name, run in runs.items()}


def deadlines() -> dict[str, Any]:
    models = [model("tight", segments=2), model("loose", segments=20)]
    load = Poisson(400, "tight", duration=SECONDS, deadline_ms=1.5)
    both = load + Poisson(250, "loose", duration=SECONDS, deadline_ms=40)

    def met(policy: str) -> dict[str, float]:
        return over_seeds(lambda seed: simulate(models, both, policy, active=1, seed=seed).all.within_target)

    return {policy: met(policy) for policy in ("lax", "edf", "fifo")}


def pack() -> dict[str, float]:
    models = [model(name, part=0.3) for name in "abc"]
    run = simulate(models, loop("a") + loop("b") + loop("c"), "pack")
    serial = simulate(models, loop("a") + loop("b") + loop("c"), "serial")
    work = {each.policy: sum(gpu_share(each, name) for name in "abc") for each in (run, serial)}
    return {name: round(value, 2) for name, value in work.items()}


def main() -> None:
    found = {
        "token": limits("token", "limit"),
        "quota": limits("quota", "share"),
        "antman": limits("antman", "performance"),
        "fair": {"models": fair(), "tenants": by_tenant()},
        "tenant limits": tenant_limits(),
        "tgs": tgs(),
        "orion": pairs("orion"),
        "reef": padding(),
        "tally": tally(),
        "muxflow": muxflow(),
        "mlfq": short_beside_long(),
        "lax": deadlines(),
        "pack": pack(),
    }
    for name, figures in found.items():
        print(name, figures)
    save("systems_simulated", {"seeds": len(SEEDS), "seconds": SECONDS, "systems": found})


if __name__ == "__main__":
    main()
