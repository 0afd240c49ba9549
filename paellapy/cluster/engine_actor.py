"""The Ray actor of an engine: it owns the engine's GPU and keeps a server alive on it.

A standby replaces a server that has ended, or that was alive and then has not answered for `hung_s`. The class is plain
(`ray.remote` is applied where it is started) and imports little, so that an actor restarts quickly.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from paellapy.cluster.process import be_as_important_as_others, end, start
from paellapy.cluster.tasks import EngineTask, given
from paellapy.serving.logs import configure, log

LOOK_S = 0.1
ASK_S = 0.5  # between two checks that the server answers
STANDBY_AFTER_S = 8.0  # of a server's life, so that its loading comes first
STOP_S = 40.0  # a server's own drain takes up to 30
ENGINE_MODULE = "paellapy.cluster.engine_process"


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EngineActor:
    """Keeps one server alive on the GPU that Ray assigned, and a standby that takes over when it ends."""

    def __init__(self, name: str, task: dict[str, Any], node_host: str | None, hung_s: float, standby: bool) -> None:
        configure("text", "info")
        be_as_important_as_others()  # its server inherits the priority
        host = node_host or _node_address()
        self._task = EngineTask(**{**task, "host": host, "port": free_port(host)})
        self.name, self._host, self._hung_s = name, host, hung_s
        self._process: subprocess.Popen[bytes] | None = None
        self._standby: subprocess.Popen[bytes] | None = None
        self._wants_standby = standby
        self._stopping, self._starts = False, 0
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        """Servers end with the thread that started them, so this thread also stops them."""
        alive_at = heard_at = 0.0  # 0: not yet
        asked_at, unheard = 0.0, 0
        while not self._stopping:
            now = time.monotonic()
            if self._process is None or self._process.poll() is not None:
                self._process = self._next()
                alive_at = heard_at = 0.0
            elif now - asked_at >= ASK_S:
                asked_at = now
                if self._is_alive():
                    heard_at, unheard = time.monotonic(), 0
                    alive_at = alive_at or heard_at
                else:
                    unheard += 1
                # One answer may be late because the whole machine was suspended; the next one is not.
                if heard_at and unheard > 1 and time.monotonic() - heard_at > self._hung_s:
                    log.error("a server does not answer and is restarted", extra={"fields": {"engine": self.name}})
                    self._process.kill()  # a stopped process would react to nothing else
                    self._process.wait()
            if self._wants_standby and self._standby is None and alive_at and now - alive_at > STANDBY_AFTER_S:
                self._standby = self._start(waits=True)
            time.sleep(LOOK_S)
        for each in (self._standby, self._process):
            if each is not None:
                end(each, STOP_S)

    def _start(self, waits: bool) -> subprocess.Popen[bytes]:
        task = msgspec.structs.replace(self._task, waits=waits)
        stdin = subprocess.PIPE if waits else subprocess.DEVNULL
        return start(ENGINE_MODULE, {**given(task), "PYTHONUNBUFFERED": "1"}, stdin=stdin)

    def _next(self) -> subprocess.Popen[bytes]:
        """The standby if there is one, else a new process."""
        self._starts += 1
        standby, self._standby = self._standby, None
        if standby is not None and standby.stdin is not None:
            with contextlib.suppress(OSError), standby.stdin as told:
                told.write(msgspec.json.encode(self._task.loaded) + b"\n")
            if standby.poll() is None:
                return standby
        return self._start(waits=False)

    def _is_alive(self) -> bool:
        """Whether it answers within half of `hung_s`: a busy machine's server is slow, not silent."""
        connection = http.client.HTTPConnection(self._host, self._task.port, timeout=max(ASK_S, self._hung_s / 2))
        try:
            connection.request("GET", "/v2/health/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def info(self, models: Sequence[str]) -> dict[str, Any]:
        """The actor's address and state. A server started from now on loads these models."""
        self._task.loaded = list(models)
        process = self._process
        return {
            "name": self.name, "url": f"http://{self._host}:{self._task.port}", "starts": self._starts,
            "pid": None if process is None else process.pid, "actor_pid": os.getpid(), "node": _node(),
        }  # fmt: skip

    def stop(self) -> None:
        """Finishes requests in flight, then ends the server for good."""
        self._stopping = True
        self._keeper.join()


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _node() -> str | None:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None
