"""Tasks of a cluster's processes, passed in their environment, which other users cannot read. A task may hold keys."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import msgspec

VARIABLE = "PAELLAPY_TASK"
Task = TypeVar("Task")


class EngineTask(msgspec.Struct, kw_only=True):
    """`loaded`: models to load at the start; the others wait for a plan. `waits`: a standby, which does nothing visible
    to others until a line of JSON on its standard input names the models to load.
    """

    config: dict[str, Any]
    names: list[str]  # of the models, in the configuration's order
    loaded: list[str]
    folder: str
    host: str
    port: int
    waits: bool = False


class RouterTask(msgspec.Struct, kw_only=True):
    engines: dict[str, str]
    options: dict[str, Any]
    models: list[str] = []
    descriptor: int | None = None  # of the socket to listen on


def given(task: EngineTask | RouterTask) -> dict[str, str]:
    """The environment for a process with this task."""
    return {VARIABLE: msgspec.json.encode(task).decode()}


def taken(kind: type[Task]) -> Task:
    """This process's task; processes that it starts do not see it."""
    return msgspec.json.decode(os.environ.pop(VARIABLE), type=kind)
