"""Random scripts for the core's bench: models, actions, and their execution."""

from __future__ import annotations

from dataclasses import replace

from core_bench import Bench, profile
from hypothesis import strategies as st_

from paellapy.scheduler.core import codes
from paellapy.scheduler.policies.policy import find_policy

profiles = st_.builds(
    lambda segments, batch, instances, ns, target, priority, limit, demand, length_of: profile(
        segments=segments,
        batch=batch,
        instances=instances,
        ns=ns,
        target_ms=target,
        priority=priority,
        queue_limit=limit,
        demand=demand,
        length_of=length_of,
    ),
    segments=st_.integers(1, 6),
    batch=st_.sampled_from([(1,), (1, 2), (2, 8), (1, 4, 8)]),
    instances=st_.integers(1, 4),
    ns=st_.sampled_from([1e3, 5e4, 1e6]),
    target=st_.sampled_from([None, 0.5, 10.0]),
    priority=st_.integers(0, 2),
    limit=st_.sampled_from([0, 3, 100]),
    demand=st_.sampled_from([{}, {1: 0.2, 2: 0.5, 4: 0.9, 8: 1.0}]),
    length_of=st_.sampled_from(["", "net"]),
)
actions = st_.lists(
    st_.one_of(
        st_.tuples(
            st_.just("submit"),
            st_.integers(0, 3),
            st_.sampled_from([codes.NEVER, 0, 500, 3000]),
            st_.integers(-1, 2),
            st_.integers(0, 3),
            st_.booleans(),
            st_.booleans(),
        ),
        st_.tuples(st_.just("cancel"), st_.integers(0, 40)),
        st_.tuples(st_.just("drain"), st_.integers(0, 15)),
        st_.tuples(st_.just("segment"), st_.integers(0, 15)),
        st_.tuples(st_.just("segment"), st_.integers(0, 15)),
        st_.tuples(st_.just("step"), st_.sampled_from([0, 1, 400, 2000])),
        st_.tuples(st_.just("step"), st_.sampled_from([0, 1, 400, 2000, 50_000_000])),
        st_.tuples(st_.just("write")),
        st_.tuples(st_.just("read")),
    ),
    max_size=80,
)
careful = replace(find_policy("srpt"), name="careful", max_in_flight=1)


def play(bench: Bench, script: list[tuple[object, ...]]) -> int:
    """Runs the script; returns the number of submitted requests."""
    submitted = 0
    for action, *a in script:
        if action == "submit" and bench.free:
            submitted += 1
            model, offset, priority, client, direct, ready = a
            bench.submit(
                int(model),  # type: ignore[call-overload]
                deadline=codes.NEVER if offset == codes.NEVER else bench.now + offset,  # type: ignore[operator]
                priority=priority,  # type: ignore[arg-type]
                client=client,  # type: ignore[arg-type]
                direct=bool(direct),
                ready=bool(ready),
            )
        elif action == "cancel":
            bench.cancel(a[0])  # type: ignore[arg-type]
        elif action == "segment" and bench.running:
            bench.finish_segment(bench.running[a[0] % len(bench.running)])  # type: ignore[operator]
        elif action == "drain" and bench.running:
            bench.drain(bench.running[a[0] % len(bench.running)])  # type: ignore[operator]
        elif action == "step":
            bench.step(a[0])  # type: ignore[arg-type]
        elif action == "write":
            bench.write()
        elif action == "read":
            bench.read()
    return submitted
