"""Processes of a cluster, as seen by whoever starts them: an engine's server, or routers, each with a keeper.

This module imports little, so that replicas on Ray start quickly.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec

# Settings for a Ray that is started here. By default its workers run at nice 15, so any other process would come
# before them on a busy CPU; and a node is declared dead only after five checks, one every 3 s.
RAY_SETTINGS = {"RAY_worker_niceness": "0", "RAY_health_check_period_ms": "1000"}
MODULE = "paellapy.cluster.keeper"
VARIABLE = "PAELLAPY_TASK"  # of the environment, which other users cannot read: a task may hold keys
ASK_S = 2.0
STOP_S = 40.0  # a server's own drain takes up to 30


class EngineTask(msgspec.Struct, kw_only=True, tag=True):
    """A server. `loaded`: models to load at its start; the others wait for a plan."""

    config: dict[str, Any]
    names: list[str]  # of the models, in the configuration's order
    loaded: list[str]
    folder: str
    host: str
    port: int
    hung_s: float = 5.0


class RouterTask(msgspec.Struct, kw_only=True, tag=True):
    """A router for each descriptor of a socket. `options` are those of `RouterOptions`."""

    engines: dict[str, str]
    options: dict[str, Any]
    models: list[str] = []
    descriptors: list[int] = []
    waits: bool = False  # until its engines are heard, before it listens: others may listen on the port already
    hung_s: float = 1.0


Task = EngineTask | RouterTask


class Health(msgspec.Struct, kw_only=True):
    """What a keeper says of its workers. `alive`: each was heard since it was forked."""

    pids: list[int] = []
    starts: int = 0
    alive: bool = False


class Kept:
    """A keeper, as seen by the process that has started it."""

    def __init__(self, task: Task, pass_fds: Sequence[int] = ()) -> None:
        self.health = Health()
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=list(pass_fds),
            env={**os.environ, VARIABLE: msgspec.json.encode(task).decode(), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches only us
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        decode = msgspec.json.Decoder(Health).decode
        with self.process.stdout as lines:
            for line in lines:
                self.health = decode(line)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def tell(self, **changes: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(msgspec.json.encode(changes) + b"\n")
            self.process.stdin.flush()

    def end(self, within_s: float = STOP_S) -> None:
        """Asks it to stop, and kills it if it does not."""
        if not self.ended:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._listener.join()


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


def be_as_important_as_others() -> None:
    """Raises the CPU priority to normal: Ray's workers run at nice 15, but engines and routers answer people.

    This needs privileges; without them, start Ray with RAY_worker_niceness=0.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))
