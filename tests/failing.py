"""Errors that a test expects, told apart by their attributes."""

from __future__ import annotations

from typing import Any

import pytest


def failing(kind: type[Exception], **facts: Any) -> Any:
    """As `pytest.raises`: an error of this class, with these attributes."""
    return pytest.raises(kind, check=lambda error: {name: getattr(error, name, None) for name in facts} == facts)
