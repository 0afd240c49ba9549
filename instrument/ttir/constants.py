"""`arith.constant`: parses the value in its text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode
from paellapy.instrument.ttir.types import ELEMENTS, Element, Type

_NUMBER = re.compile(r"[-+]?(?:0x[0-9A-Fa-f]+|[\w.]+(?:[eE][-+]\d+)?)")


def constant(text: str, type: Type | None) -> Any:
    """A scalar for a splat, an array with a leading block axis for a list.

    >>> from paellapy.instrument.ttir.types import parse_type
    >>> constant("dense<0xFF800000>", parse_type("tensor<4xf32>"))
    np.float32(-inf)
    """
    element = type.element if type else ELEMENTS["i1"]
    shape = type.shape if type else ()
    text = text.strip()
    if text.startswith("dense<"):
        text = text[6:-1].strip()
    if text.startswith('"0x'):
        raw = np.frombuffer(bytes.fromhex(text[3:-1]), element.storage)
        return decode(raw.reshape((1, *shape)), element)
    if text.startswith("["):
        return np.array([_number(x, element) for x in _NUMBER.findall(text)], element.compute).reshape((1, *shape))
    return _number(text, element)


def _number(text: str, element: Element) -> Any:
    if text in ("true", "false"):
        return np.bool_(text == "true") if element.name == "i1" else element.compute.type(-(text == "true"))
    if re.match(r"[-+]?0x", text):  # a bit pattern, as MLIR prints infinities and NaN
        bits = np.array([int(text, 16)], np.uint64).astype(element.bits)
        return decode(bits.view(element.storage), element)[0]
    if element.is_float:
        return element.compute.type(float(text))
    wrapped = int(text) & (2 ** (8 * element.size) - 1)
    return np.array([wrapped], np.uint64).astype(element.bits).view(element.compute)[0]
