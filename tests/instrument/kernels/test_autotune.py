"""Autotuning on a device whose clock we set: the fastest is chosen, once, and trials leave no traces."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from stand_in_device import Launch, StandInDevice

from paellapy.instrument.device import Device
from paellapy.instrument.device.virtual_launch import VirtualLauncher
from paellapy.instrument.errors import ArgumentError, LaunchError
from paellapy.instrument.kernels.autotune import rank_configs
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.traces.session import trace


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


# ---- predicted times -------------------------------------------------------------------------------------------------


@triton.jit
def shifted(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def blocks(meta: Any) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["B"]),)


TILES = [triton.Config({"B": b}) for b in (32, 64, 1024)]


def predicted_and_traced(configs: Any, n: int) -> tuple[list[Any], list[int]]:
    """Configurations as ranked, and the times of their launches in a trace in the same order."""
    made, x, out = kernel(shifted), np.zeros(n, np.float32), np.zeros(n, np.float32)
    ranked = rank_configs(made, blocks, x, out, n, configs=configs)
    assert not out.any(), "nothing was launched"
    spans = []
    for each in ranked:
        with trace() as t:
            made[blocks](x, out, n, **each.config.kwargs)
        spans.append(int(t.blocks["end_ns"].max() - t.blocks["start_ns"].min()))
    return ranked, spans


def test_configurations_are_ranked_as_their_launches_then_take() -> None:
    with Device("virtual:h200"):
        ranked, spans = predicted_and_traced(TILES, 1 << 20)
    assert spans == sorted(spans)
    assert [each.time_ns for each in ranked] == pytest.approx(spans, rel=0.05)
    assert ranked[0].config.kwargs == {"B": 1024}


def test_a_configuration_that_fits_on_no_sm_is_ranked_last_with_its_error() -> None:
    large = triton.Config({"B": 256}, num_warps=32)
    with Device("virtual:h200"):
        a, b, c = (np.zeros((256, 256), np.float32) for _ in range(3))
        ranked = rank_configs(kernel(square), (1,), a, b, c, configs=[large, triton.Config({"B": 16})])
    assert [each.config.kwargs["B"] for each in ranked] == [16, 256]
    assert ranked[1].time_ns == float("inf")
    assert ranked[1].error.kernel == "square"
    assert ranked[0].error is None


@triton.jit
def square(a, b, c, B: tl.constexpr):
    i, k = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    tl.store(c + i * B + k, tl.dot(tl.load(a + i * B + k), tl.load(b + i * B + k)))


def test_a_kernel_without_configurations_has_none_to_rank() -> None:
    with Device("virtual:h200"), failing(ArgumentError, kernel="fill", field="configs"):
        rank_configs(kernel(fill), (1,), X, 256)


def test_the_virtual_gpu_chooses_without_running_and_keeps_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    predict = VirtualLauncher.predict_ns
    monkeypatch.setattr(VirtualLauncher, "predict_ns", lambda *args: ran.append(1) or predict(*args))
    n = (1 << 18) + 16 * (time.time_ns() % 10_000)  # that no earlier run has kept
    x, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for predictions in (len(TILES), 0):  # the second kernel finds what the first has kept on disk
        made = kernel(triton.autotune(TILES, ["n"])(shifted))
        ran.clear()
        with Device("virtual:h200"):
            made[blocks](x, out, n)
        assert (out == 1).all()
        assert made.best_config.kwargs == {"B": 1024}
        assert len(ran) == predictions


@triton.jit
def first_tile(tiles, out, B: tl.constexpr):
    tl.store(out + tl.arange(0, B), tl.sum(tiles.load([0, 0]), axis=0))


def test_the_virtual_gpu_chooses_for_tensor_descriptors() -> None:
    torch = pytest.importorskip("torch")
    from triton.tools.tensor_descriptor import TensorDescriptor

    configs = [triton.Config({}, num_warps=w) for w in (1, 4)]
    x, out = torch.ones(16, 16), torch.zeros(16)
    with Device("virtual:h200"):
        kernel(triton.autotune(configs, [])(first_tile))[1,](TensorDescriptor.from_tensor(x, [16, 16]), out, 16)
    assert (out == 16).all()
