"""Errors and warnings that a test expects, told apart by their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def failing(kind: type[Exception], **facts: Any) -> Any:
    """As `pytest.raises`: an error of this class, with these attributes."""
    return pytest.raises(kind, check=lambda error: {name: getattr(error, name, None) for name in facts} == facts)


@contextmanager
def warning(kind: type[Warning], **facts: Any) -> Iterator[None]:
    """As `pytest.warns`: a warning of this class, and each such one with these attributes."""
    with pytest.warns(kind) as found:
        yield
    for each in (one.message for one in found if isinstance(one.message, kind)):
        assert {name: getattr(each, name, None) for name in facts} == facts
