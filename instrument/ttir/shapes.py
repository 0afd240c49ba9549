"""Ops that move elements. Each function returns one that works on values with the block axis in front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.errors import OutOfBoundsError
from paellapy.instrument.ttir.values import full, is_array

Shape = tuple[int, ...]
Function = Callable[..., Any]


def splat(rank: int) -> Function:
    tail = (1,) * rank
    return lambda x: x.reshape((-1, *tail)) if is_array(x) else x


def expand_dims(axis: int) -> Function:
    return lambda x: np.expand_dims(x, axis + 1) if is_array(x) else x


def reshape(old: Shape, new: Shape) -> Function:
    return lambda x: full(x, old).reshape((x.shape[0], *new)) if is_array(x) else x


@dataclass(slots=True, frozen=True)
class Transpose:
    order: Shape

    def __call__(self, x: Any) -> Any:
        return x.transpose((0, *(o + 1 for o in self.order))) if is_array(x) else x


def join(shape: Shape) -> Function:
    return lambda a, b: np.stack(np.broadcast_arrays(full(a, shape), full(b, shape)), -1)


def half(shape: Shape, i: int) -> Function:
    return lambda x: full(x, shape)[..., i] if is_array(x) else x


def cat(shape: Shape) -> Function:
    return lambda a, b: np.concatenate(np.broadcast_arrays(full(a, shape), full(b, shape)), 1)


def gather(axis: int, source: Shape, index: Shape, where: str) -> Function:
    a = axis + 1

    def run(x: Any, at: Any) -> Any:
        x, at = full(x, source), full(at, index)
        nb = max(x.shape[0], at.shape[0])
        x, at = np.broadcast_to(x, (nb, *source)), np.broadcast_to(at, (nb, *index))
        if at.size and (at.min() < 0 or at.max() >= source[axis]):
            bad = int(at[(at < 0) | (at >= source[axis])][0])
            raise OutOfBoundsError(
                f"{where}: tl.gather takes element {bad} along axis {axis}, which has {source[axis]}; keep the indices "
                "within it"
            )
        return np.take_along_axis(x, at, a)

    return run


def histogram(shape: Shape, bins: int, dtype: Any) -> Function:
    def run(x: Any, mask: Any = None) -> Any:
        x = full(x, shape)
        nb = max(x.shape[0], mask.shape[0]) if is_array(mask) else x.shape[0]
        keep = (x >= 0) & (x < bins)
        if mask is not None:
            keep = keep & full(mask, shape)
        x = np.broadcast_to(x, (nb, *shape)) + np.arange(nb).reshape((-1,) + (1,) * len(shape)) * bins
        counts = np.bincount(x[np.broadcast_to(keep, x.shape)].ravel(), minlength=nb * bins)
        return counts.reshape(nb, bins).astype(dtype)

    return run
