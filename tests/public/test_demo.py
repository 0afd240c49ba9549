"""The demo models compute what NumPy says they do, and know digits they have never seen."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import paellapy as pp
from paellapy import demo
from paellapy.demo import reference
from paellapy.instrument.device import Device
from paellapy.scheduler.core.errors import UnknownModelError

NAMES = demo.names()
KERNELS = {"mlp": 3, "cnn": 11, "transformer": 75}
RUN_BATCH = 32  # images at once where all held-out ones are run


def _infer(device: Device, name: str, images: np.ndarray) -> np.ndarray:
    model = demo.load(name)
    weights = {key: device.array(value) for key, value in model.weights.items()}
    parts = []
    for low in range(0, len(images), RUN_BATCH):
        part = images[low : low + RUN_BATCH]
        scores = device.empty((len(part), *model.outputs["scores"].shape), model.outputs["scores"].dtype)
        model.fn(weights, {"image": device.array(part)}, {"scores": scores})
        parts.append(scores.numpy())
    return np.concatenate(parts)


def _check_against_reference(device: Device, name: str, batch: int) -> None:
    images = demo.held_out()[0][:batch]
    expected = reference.forward(name, demo.load_weights(name), images)
    scores = _infer(device, name, images)
    assert scores.shape == (batch, 10)
    assert scores.dtype == np.float32
    np.testing.assert_array_less(np.abs(scores - expected).max(axis=1) / expected.max(axis=1), 1e-5)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "device", "batch"),
    [*((name, "virtual:h200", batch) for name in NAMES for batch in (1, 3, 8)), ("transformer", "virtual:a100", 3)],
)
def test_equals_the_reference_in_any_batch(name: str, device: str, batch: int) -> None:
    with Device(device) as opened, pp.trace() as t:
        _check_against_reference(opened, name, batch)
    assert len(t.launches) == KERNELS[name]


@pytest.mark.parametrize("name", NAMES)
def test_knows_held_out_digits(name: str) -> None:
    """By the reference, which a device's scores equal: the virtual GPU takes seconds for all images."""
    images, labels = demo.held_out()
    scores = reference.forward(name, demo.load_weights(name), images)
    assert np.mean(scores.argmax(axis=1) == labels) >= 0.95


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 32])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference_on_a_gpu(gpu: Device, name: str, batch: int) -> None:
    _check_against_reference(gpu, name, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_knows_held_out_digits_on_a_gpu(gpu: Device, name: str) -> None:
    images, labels = demo.held_out()
    assert np.mean(_infer(gpu, name, images).argmax(axis=1) == labels) >= 0.95


def test_models_are_described() -> None:
    for name in NAMES:
        model = demo.load(name, batch=(1, 4), target_ms=2.0)
        assert (model.name, model.batch, model.target_ms) == (name, (1, 4), 2.0)
        assert model.inputs["image"].shape == (8, 8)
        assert model.outputs["scores"].shape == (10,)
        assert all(w.dtype == np.float32 for w in model.weights.values())


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UnknownModelError, check=lambda e: e.model == "rnn"):
        demo.load("rnn")


def test_weights_are_small_and_plain() -> None:
    """Plain arrays: reading them runs no code."""
    paths = list(Path(str(files("paellapy.demo") / "weights")).iterdir())
    assert {path.name for path in paths} == {f"{name}.npz" for name in (*NAMES, "digits_test")}
    assert sum(path.stat().st_size for path in paths) < 1_500_000
    for path in paths:
        for array in np.load(path, allow_pickle=False).values():
            assert array.dtype.kind in "fu"
            assert np.isfinite(array).all()


def test_held_out_digits() -> None:
    images, labels = demo.held_out()
    assert images.shape == (360, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert sorted(set(labels)) == list(range(10))
