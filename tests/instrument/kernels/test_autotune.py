"""Autotuning on a device whose clock we set: the fastest is chosen, once, and trials leave no traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from stand_in_device import Launch, StandInDevice

from paellapy.instrument.errors import ArgumentError, LaunchError
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.triton_kernel import TritonKernel


@triton.jit
def fill(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, 1.0, mask=i < n)


@triton.jit
def product(a, b, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(a + i, tl.load(b + i) * n)


X = np.zeros(256, np.float32)
CONFIGS = [triton.Config({"B": b}, num_warps=w) for b, w in ((64, 1), (64, 2), (64, 4))]


def tuned(configs: Any = CONFIGS, **options: Any) -> TritonKernel:
    return kernel(triton.autotune(configs=configs, key=["n"], **options)(fill))


def cost_ns(launch: Launch) -> float:
    return {32: 30.0, 64: 10.0, 128: 20.0}[launch.threads or 0]


def test_the_fastest_is_timed_once_and_used_from_then_on() -> None:
    with StandInDevice.make(cost_ns=cost_ns) as device:
        made = tuned()
        made[(4,)](X, 256)
        trials = len(device.launches)
        assert trials > len(CONFIGS)
        made[(4,)](X, 256)
        assert len(device.launches) == trials + 1
        assert {launch.threads for launch in device.launches[trials - 1 :]} == {64}
        made[(4,)](X, 512)
        assert len(device.launches) > trials + 2, "another key is timed anew"


def test_one_configuration_needs_no_trial() -> None:
    with StandInDevice.make() as device:
        tuned(CONFIGS[:1])[(4,)](X, 256)
    assert len(device.launches) == 1


def test_trials_are_not_part_of_a_trace() -> None:
    with StandInDevice.make(cost_ns=cost_ns) as device:
        device.session = session = object()
        tuned()[(4,)](X, 256)
        assert device.session is session
    assert [launch.config.report for launch in device.launches].count("trace") == 1


def test_configurations_that_do_not_fit_are_passed_over() -> None:
    with StandInDevice.make(cost_ns=cost_ns, refuses=lambda source: source.threads == 64) as device:
        tuned()[(4,)](X, 256)
    assert device.launches[-1].threads == 128


def test_when_none_fits_the_reason_is_given() -> None:
    with StandInDevice.make(refuses=lambda source: True), failing(LaunchError, kernel="fill"):
        tuned()[(4,)](X, 256)


def test_wrong_arguments_are_not_a_slow_configuration() -> None:
    with StandInDevice.make(), failing(ArgumentError, kernel="fill", argument="n"):
        tuned()[(4,)](X)


def test_hooks_run_before_every_trial_and_every_launch() -> None:
    seen: list[int] = []
    configs = [triton.Config({"B": b}, pre_hook=lambda args: seen.append(args["B"])) for b in (32, 64)]
    with StandInDevice.make() as device:
        tuned(configs)[(4,)](X, 256)
    assert len(seen) == len(device.launches)
    assert set(seen) == {32, 64}


def test_hooks_of_the_tuner_run_around_every_trial_and_before_the_launch() -> None:
    seen: list[Any] = []
    hooks = {
        "pre_hook": lambda args, reset_only=False: seen.append(("before", args["B"], reset_only)),
        "post_hook": lambda args, exception: seen.append(("after", args["B"], exception)),
    }
    with StandInDevice.make(cost_ns=cost_ns) as device:
        made = tuned(**hooks)
        made[(4,)](X, 256)
        trials = len(device.launches) - 1
        assert seen == [("before", 64, False), ("after", 64, None)] * trials + [("before", 64, True)]
        made[(4,)](X, 256)
    assert len(seen) == 2 * trials + 1, "they are for trials only"


def test_a_hook_of_the_tuner_hears_of_a_trial_that_failed() -> None:
    seen: list[Any] = []
    with StandInDevice.make(refuses=lambda source: source.threads == 64):
        tuned(post_hook=lambda args, exception: seen.append(exception))[(4,)](X, 256)
    assert [type(e) for e in seen if e is not None] == [LaunchError]


def test_a_hook_of_the_users_own_takes_the_place_of_reset_to_zero() -> None:
    x = np.ones(256, np.float32)
    with StandInDevice.make():
        tuned(pre_hook=lambda args, reset_only=False: None, reset_to_zero=["x"])[(4,)](x, 256)
    assert x.all()


@pytest.mark.parametrize("configs", [CONFIGS, CONFIGS[:1]], ids=["several", "one"])
def test_a_parameter_of_the_tuner_cannot_be_given_too(configs: Any) -> None:
    with StandInDevice.make():
        for refused in (ArgumentError, ValueError):
            with failing(refused, field="B"):
                tuned(configs)[(4,)](X, 256, B=64)


def test_arguments_are_put_back_after_trials() -> None:
    zeroed, kept = np.ones(4, np.float32), np.ones(4, np.float32)
    seen: list[tuple[float, float]] = []

    def spoil(launch: Launch) -> float:
        seen.append((zeroed[0], kept[0]))
        zeroed[:], kept[:] = 5, 5
        return 1.0

    made = kernel(triton.autotune(configs=CONFIGS, key=[], reset_to_zero=["a"], restore_value=["b"])(product))
    with StandInDevice.make(cost_ns=spoil):
        made[(1,)](zeroed, kept, 3)
    assert {a for a, _ in seen} == {0.0}, "zeroed before each"
    assert seen[-1] == (0.0, 1.0), "and the launch itself finds what the caller gave"


def test_pruning_that_leaves_nothing_is_an_error() -> None:
    prune = {"early_config_prune": lambda configs, named, **kwargs: []}
    with StandInDevice.make(), failing(ArgumentError, field="configs"):
        tuned(prune_configs_by=prune)[(4,)](X, 256)


def test_heuristics_see_all_arguments() -> None:
    chosen = kernel(triton.heuristics({"B": lambda args: min(args["n"], 64)})(fill))
    with StandInDevice.make() as device:
        chosen[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](X, 256)
        chosen[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](X, n=32)
    assert [launch.grid for launch in device.launches] == [(4,), (1,)]
