"""Functions before and after models, for processes that import them by name."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np


def read(text: str) -> dict[str, Any]:
    """Numbers in a text, padded with zeros; some words do something else."""
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        raise SystemExit(3)
    if text == "hang":
        threading.Event().wait()
    if text == "break":
        raise KeyError("a bug")
    if text == "short":
        return {"x": np.zeros(3, np.float32)}
    numbers = [float(each) for each in text.split()]
    return {"x": np.array(numbers + [0.0] * (64 - len(numbers)), np.float32)}


def say(y: Any) -> dict[str, Any]:
    if y[0] == 26.0:
        raise ValueError("thirteen")
    words = " ".join(f"{each:g}" for each in y if each)
    return {"total": np.float32(y.sum()), "words": words, "raw": b"\xff" + y.tobytes()}


def count(y: Any) -> dict[str, Any]:
    return {"embedding": y, "tokens": np.int64(np.count_nonzero(y))}


# Of pipelines.


def numbers(text: str) -> dict[str, Any]:
    if text == "hang":
        threading.Event().wait()
    return read(text)


def halves(y: Any) -> Any:
    """One element for each number; some numbers do something else."""
    if y[0] == 2 * 666:
        raise ValueError("a bug")
    if y[0] == 2 * 777:
        return 3
    if y[0] == 2 * 999:
        return [{"x": y[:3]}]
    return [{"x": np.full(64, each, np.float32)} for each in y if each]


def join(y: list[Any]) -> dict[str, Any]:
    return {"words": " ".join(f"{each[0]:g}" for each in y), "total": np.float32(sum(each[0] for each in y))}


TAKES = {"text": str}
GIVES = {"total": "float32", "words": str, "raw": bytes}
