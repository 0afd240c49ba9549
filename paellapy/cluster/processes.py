"""Processes of a cluster: one for each engine and each router, `python -m paellapy.cluster.processes`.

A process gets a task in its environment and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.engine_state import Member
from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.router import Router, RouterOptions
from paellapy.instrument.errors import ArgumentError
from paellapy.serving.api import serve_config
from paellapy.serving.build import build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory

MODULE = "paellapy.cluster.processes"
VARIABLE = "PAELLAPY_TASK"  # of the environment, which other users cannot read: a task may hold keys
LOOK_S = 0.2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class EngineTask(msgspec.Struct, kw_only=True, tag=True):
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


class RouterTask(msgspec.Struct, kw_only=True, tag=True):
    """`options` are those of `RouterOptions`."""

    engines: dict[str, str]
    options: dict[str, Any]
    models: list[str] = []
    descriptor: int | None = None  # of the socket to listen on


Task = EngineTask | RouterTask


def taken_task() -> Task:
    """This process's task; processes that it starts do not see it."""
    task: Task = msgspec.json.decode(os.environ.pop(VARIABLE), type=Task)
    return task


def _die_with_parent() -> None:
    """Runs in the child before its program: the kernel ends it when the thread that started it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(task: Task, pass_fds: Sequence[int] = (), stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts the process of a task. It ends with us, and has its own session, so that Ctrl-C reaches only us."""
    return subprocess.Popen(
        [sys.executable, "-m", MODULE],
        pass_fds=list(pass_fds),
        env={**os.environ, VARIABLE: msgspec.json.encode(task).decode(), "PYTHONUNBUFFERED": "1"},
        stdin=stdin,
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )


def be_as_important_as_others() -> None:
    """Raises the CPU priority to normal: Ray's workers run at nice 15, but engines and routers answer people.

    This needs privileges; without them, start Ray with RAY_worker_niceness=0.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))


def end(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Asks all processes to stop, and kills those that do not."""
    for each in processes:
        if each.stdin is not None:
            each.stdin.close()
        if each.poll() is None:
            each.terminate()
    until = time.monotonic() + within_s
    for each in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, until - time.monotonic()))
        if each.poll() is None:
            each.kill()
        each.wait()


# -- routers


class Routers:
    """`number` router processes on one port, in front of a fixed list of engines; they do not know of each other."""

    def __init__(self, engines: Mapping[str, str], options: RouterOptions, number: int = 1) -> None:
        if not engines:
            said = "a router needs engines: give the address of each, as in http://127.0.0.1:8001"
            raise ArgumentError(said, field="engines")
        if len({Member(name, url).address for name, url in engines.items()}) < len(engines):
            raise ArgumentError("two engines have the same address: list each engine once", field="engines")
        if number < 1:
            raise ArgumentError(f"there cannot be {number} routers: give 1 or more", field="number", given=number)
        self._engines, self._options = dict(engines), options
        self._shares = Shares(options.host, options.port, number)
        self.url = url_of(self._shares.address, tls=False)
        self.processes = [self._start(k) for k in range(number)]

    def _start(self, k: int) -> subprocess.Popen[bytes]:
        descriptor = self._shares[k].fileno()
        task = RouterTask(engines=self._engines, options=asdict(self._options), descriptor=descriptor)
        return start(task, [descriptor])

    def look(self) -> None:
        """Restarts routers that have ended. Their sockets stay open, so that new connections wait there meanwhile."""
        for k, process in enumerate(self.processes):
            if process.poll() is not None:
                log.error("a router ended and is being restarted", extra={"fields": {"code": process.returncode}})
                self.processes[k] = self._start(k)

    def close(self) -> None:
        self._shares.close()
        end(self.processes, self._options.drain_s + 2.0)

    def __enter__(self) -> Routers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_routers(
    engines: Mapping[str, str], options: RouterOptions, number: int, announce: Callable[[str], None] | None = None
) -> None:
    """Runs until SIGTERM or SIGINT."""
    stop = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: stop.set())
    with contextlib.closing(Routers(engines, options, number)) as routers:
        if announce is not None:
            announce(routers.url)
        while not stop.wait(LOOK_S):
            routers.look()


# -- the processes themselves


def run_engine(task: EngineTask) -> None:
    """A server. A standby imports its modules and reads compiled code before it is needed; it does not open the GPU."""
    source = Source(str(Path(task.folder) / "cluster.toml"))
    config = _config(task)
    if task.waits:
        warm_up(build_policy(config, source))
        import_device(config.device)
        line = sys.stdin.buffer.readline()
        if not line:  # its actor no longer needs it
            return
        task.loaded = msgspec.json.decode(line, type=list[str])
        config = _config(task)
    serve_config(config, source)


def _config(task: EngineTask) -> Config:
    models = [
        {**each, "name": name, "load": name in task.loaded}
        for each, name in zip(task.config["models"], task.names, strict=True)
    ]
    server = {**task.config.get("server", {}), "host": task.host, "port": task.port, "model_control": True}
    return load_config(options={**task.config, "models": models, "server": server})[0]


async def run_router(task: RouterTask) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listening = None if task.descriptor is None else socket.socket(fileno=task.descriptor)
    door = FrontDoor(Router(RouterOptions(**task.options), task.models), listening)
    door.router.set_members(Member(name, url) for name, url in task.engines.items())
    await door.start()
    try:
        await stop.wait()
    finally:
        await door.stop()


def main() -> None:
    task = taken_task()
    if isinstance(task, EngineTask):
        run_engine(task)
        return
    configure("text", "info")
    keep_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_router(task))


if __name__ == "__main__":
    main()
