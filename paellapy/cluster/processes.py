"""Processes of a cluster, as seen by whoever starts them: an engine's server, or routers, each with a keeper.

This module imports little, so that replicas on Ray start quickly.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec

from paellapy.serving.workers.keeper import Kept, Task

# Settings for a Ray that is started here. By default its workers run at nice 15, so any other process would come
# before them on a busy CPU; and a node is declared dead only after five failed checks, one every 3 s.
RAY_SETTINGS = {"RAY_worker_niceness": "0", "RAY_health_check_period_ms": "300"}
MODULE = "paellapy.cluster.keeper"
ASK_S = 2.0


class EngineTask(Task, kw_only=True, tag=True):
    """A server. `loaded`: models to load at its start; the others wait for a plan."""

    config: dict[str, Any]
    names: list[str]  # of the models, in the configuration's order
    loaded: list[str]
    folder: str
    host: str
    port: int
    name: str = ""  # in the cluster
    gpus: str = ""  # those that Ray has assigned
    hung_s: float = 5.0

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.config, self.names, self.folder, self.host, self.gpus, self.hung_s


class RouterTask(Task, kw_only=True, tag=True):
    """A router for each descriptor of a socket. `options` are those of `RouterOptions`."""

    engines: dict[str, str]
    options: dict[str, Any]
    models: list[str] = msgspec.field(default_factory=list)
    descriptors: list[int] = msgspec.field(default_factory=list)
    waits: bool = False  # until its engines are heard, before it listens: others may listen on the port already


def kept(task: EngineTask | RouterTask, descriptors: Sequence[int] = ()) -> Kept:
    return Kept(task, MODULE, descriptors)


def ask(url: str, key: str | None = None, data: bytes | None = None, within_s: float = ASK_S) -> bytes:
    """The answer of a server of the cluster, which no proxy of the environment is for; OSError: there is none."""
    request = urllib.request.Request(url, data, {} if key is None else {"X-API-Key": key})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=within_s) as answer:
        return bytes(answer.read())


def answers(url: str, within_s: float = ASK_S) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(url, within_s=within_s)
        return True
    return False


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
