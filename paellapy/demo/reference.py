"""The demo models in NumPy and float64, for comparison: `forward(name, weights, images)` returns the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from paellapy.demo.models import HEADS, NORM_EPS, PATCH

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def forward(name: str, weights: Mapping[str, NDArray[Any]], images: NDArray[Any]) -> Array:
    """Scores (n, 10) of images (n, 8, 8)."""
    wide = {key: np.asarray(value, np.float64) for key, value in weights.items()}
    return _FORWARDS[name](wide, np.asarray(images, np.float64))


def _mlp(weights: Weights, images: Array) -> Array:
    x = images.reshape(len(images), -1)
    for layer in ("0", "1"):
        x = np.maximum(_linear(x, weights, layer), 0)
    return _softmax(_linear(x, weights, "classes"))


def _cnn(weights: Weights, images: Array) -> Array:
    x = _double(images)[..., None]
    for layer in range(6):
        if layer in (2, 4):
            n, h, w, c = x.shape
            x = x.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))
        windows = sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2))
        y = np.einsum("nhwcij,ijcf->nhwf", windows, weights[f"{layer}.weight"], optimize=True)
        x = np.maximum(y + weights[f"{layer}.bias"], 0)
    return _softmax(_linear(x.mean(axis=(1, 2)), weights, "classes"))


def _transformer(weights: Weights, images: Array) -> Array:
    x = _double(images)
    n, side = x.shape[:2]
    across = side // PATCH
    patches = x.reshape(n, across, PATCH, across, PATCH).swapaxes(2, 3).reshape(n, across**2, PATCH**2)
    embedding = weights["patch.weight"].reshape(PATCH**2, -1)
    x = patches @ embedding + weights["patch.bias"] + weights["position"]
    for i in range(sum(key.endswith(".qkv.weight") for key in weights)):
        x = x + _linear(_attend(_linear(_norm(x, weights, f"{i}.norm1"), weights, f"{i}.qkv")), weights, f"{i}.mix")
        x = x + _linear(_gelu(_linear(_norm(x, weights, f"{i}.norm2"), weights, f"{i}.up")), weights, f"{i}.down")
    return _softmax(_linear(_norm(x, weights, "norm").mean(axis=1), weights, "classes"))


_FORWARDS: dict[str, Callable[[Weights, Array], Array]] = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}


def _linear(x: Array, weights: Weights, name: str) -> Array:
    y: Array = x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return y


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = powers / powers.sum(axis=-1, keepdims=True)
    return y


def _gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def _norm(x: Array, weights: Weights, name: str) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + NORM_EPS)
    y: Array = centred / scale * weights[f"{name}.gain"] + weights[f"{name}.bias"]
    return y


def _attend(qkv: Array) -> Array:
    n, tokens, _ = qkv.shape
    q, k, v = qkv.reshape(n, tokens, 3, HEADS, -1).transpose(2, 0, 3, 1, 4)
    mixed = _softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    y: Array = mixed.swapaxes(1, 2).reshape(n, tokens, -1)
    return y


def _double(images: Array) -> Array:
    """Doubles height and width, bilinear."""
    for axis in (1, 2):
        edged = np.pad(images, [(1, 1) if a == axis else (0, 0) for a in range(3)], mode="edge")
        before, after = np.delete(edged, [-2, -1], axis), np.delete(edged, [0, 1], axis)
        pairs = np.stack((0.75 * images + 0.25 * before, 0.75 * images + 0.25 * after), axis + 1)
        images = pairs.reshape([2 * n if a == axis else n for a, n in enumerate(images.shape)])
    return images
