"""Compiling that takes its time says so, once, and nothing else does."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from paellapy.instrument.numba_ext import link
from paellapy.instrument.numba_ext.link import COMPILING, Announcer

pytestmark = pytest.mark.versions


def compiling(module: str = "paellapy.scheduler.core.step") -> Any:
    return SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAELLAPY_QUIET", raising=False)
    monkeypatch.setattr(link, "PATIENCE_S", 0.0)


def said(capsys: pytest.CaptureFixture[str], within_s: float = 10.0) -> str:
    """Everything on stderr, once there is something."""
    text = ""
    end = time.monotonic() + within_s
    while not text and time.monotonic() < end:
        time.sleep(0.01)
        text = capsys.readouterr().err
    return text


def test_a_long_compilation_is_announced_once(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer()
    announcer.on_start(compiling())
    announcer.on_start(compiling())  # a part of it
    assert said(capsys).strip() == COMPILING
    announcer.on_end(compiling())
    announcer.on_end(compiling())
    announcer.on_start(compiling())
    assert said(capsys, within_s=0.2) == ""
    announcer.on_end(compiling())


def test_what_is_over_soon_or_others_compile_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    announcer = Announcer()
    announcer.on_start(compiling("somebody.else"))
    assert said(capsys, within_s=0.2) == ""
    monkeypatch.setattr(link, "PATIENCE_S", 60.0)
    announcer.on_start(compiling())
    announcer.on_end(compiling())
    assert said(capsys, within_s=0.2) == ""


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_QUIET", "1")
    announcer = Announcer()
    announcer.on_start(compiling())
    assert said(capsys, within_s=0.2) == ""
    announcer.on_end(compiling())
