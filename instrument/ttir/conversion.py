"""Conversions between memory and computation: widening loaded values, rounding stored ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from paellapy.instrument.ttir import native
from paellapy.instrument.ttir.types import Array, Element

MIN_COMPILED = 64  # number of elements from which a compiled loop is faster than NumPy's conversion


def decode(raw: Any, element: Element) -> Any:
    """Converts memory contents (array or scalar of `element.storage`) to the compute type."""
    if not element.narrow:
        return raw
    if type(raw) is np.ndarray and raw.size >= MIN_COMPILED:
        if element.name == "f16":
            raw = np.ascontiguousarray(raw)
            out = np.empty(raw.shape, np.float32)
            native.from_half(raw.view(np.uint16).reshape(-1), out.view(np.uint32).reshape(-1))
            return out
        if element.size == 1:
            raw = np.ascontiguousarray(raw)
            out = np.empty(raw.shape, np.float32)
            native.look_up(_table(element), raw.reshape(-1), out.reshape(-1))
            return out
    return raw.view(element.memory).astype(element.compute)


@cache
def _table(element: Element) -> Array:
    return np.arange(256, dtype=np.uint8).view(element.memory).astype(np.float32)


def narrowed(value: Any, element: Element) -> Any:
    """Compute values as `element.memory`, rounded to nearest even and saturated where the hardware saturates."""
    if element.limit is not None:
        value = np.clip(value, np.float32(-element.limit), np.float32(element.limit))
    if element.name == "f16" and type(value) is np.ndarray and value.size >= MIN_COMPILED and value.dtype == np.float32:
        value = np.ascontiguousarray(value)
        out = np.empty(value.shape, np.uint16)
        native.to_half(value.reshape(-1), value.view(np.uint32).reshape(-1), out.reshape(-1))
        return out.view(np.float16)
    return value.astype(element.memory)


def encode(value: Any, element: Element) -> Any:
    """Converts compute values to memory contents (`element.storage`)."""
    return narrowed(value, element).view(element.storage) if element.narrow else value


def rounder(element: Element) -> Callable[[Any], Any] | None:
    """A function that rounds compute values to `element`'s precision, or None if they already have it."""
    if not element.narrow:
        return None

    def round_to(value: Any) -> Any:
        return decode(narrowed(value, element).view(element.storage), element)

    return round_to
