"""Costs of a program's blocks: the rehearsal has seen those of a run of the program."""

from __future__ import annotations

import numpy as np

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.models.memory import Instance, plan_instance


def test_costs_seen_in_the_rehearsal_are_those_of_the_program():
    model = demo.load("cnn", batch=(2,))
    costs = []
    for rehearsed in (True, False):
        backend = VirtualBackend(pp.Device("virtual:h200"))
        weights = backend.upload(model)
        scratch, _ = backend.warm_up_all(model, weights, model.batch)
        if not rehearsed:
            backend.costs.warm_ups.clear()
        plan = plan_instance(model, scratch, 8)
        program = backend.capture(Instance(0, model, plan, backend.instance_memory(plan)), weights, 2, {})
        assert (backend.costs.seen(program) is not None) == rehearsed
        costs.append(backend.costs.of(program))
    for a, b in zip(*costs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            for name in ("bytes", "flops", "tensor_flops", "wait_ns"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
