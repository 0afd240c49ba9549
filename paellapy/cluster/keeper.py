"""`python -m paellapy.cluster.keeper`: keeps an engine's server or routers alive.

A *keeper* gets a task in its environment, imports and compiles everything, and then forks the workers that do the task.
A worker that ends, or falls silent, is forked again at once, without the slow part of a start; keeper and workers share
their memory. Lines of JSON on the keeper's standard input change its task, and lines on its standard output say how its
workers are. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import http.client
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paellapy.cluster.engine_state import Member
from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.processes import STOP_S, VARIABLE, EngineTask, Health, RouterTask, Task
from paellapy.cluster.router import Router, RouterOptions
from paellapy.serving.api import serve_config
from paellapy.serving.build import build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory

LOOK_S = 0.2
BEAT_S = 0.1  # between two lines of a router to its keeper
ASK_S = 0.5  # least limit of a server's answer to its keeper
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(slots=True)
class Worker:
    """A forked process. `heard_at`: when it was last heard; 0: not yet."""

    pid: int
    channel: socket.socket
    heard_at: float = 0.0
    unheard: int = 0
    said: bytes = b"{}"


@dataclass
class Keeper:
    """`is_heard` asks whether a worker is well. One late answer may have the machine's suspension as its cause, so a
    worker counts as silent only from the second on.
    """

    task: Task
    is_heard: Callable[[Worker], bool]
    number: int = 1
    workers: list[Worker] = field(default_factory=list)
    starts: int = 0
    _said: int = -1  # descriptor of the output

    def run(self) -> tuple[int, socket.socket] | None:
        """Returns None when it ends, and in a forked worker its number and its channel to the keeper."""
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake, waking = socket.socketpair()
        for each in (wake, waking):
            each.setblocking(False)
        signal.set_wakeup_fd(waking.fileno())  # a signal ends the wait below
        self._said = os.dup(1)
        os.dup2(2, 1)  # models may print
        os.set_blocking(self._said, False)
        looked_at = 0.0
        while not stop:
            while len(self.workers) < self.number:
                if (work := self._fork(len(self.workers))) is not None:
                    return work
            for k, worker in enumerate(self.workers):
                if os.waitpid(worker.pid, os.WNOHANG)[0]:
                    worker.channel.close()
                    log.error("a process of the cluster ended and is started again")
                    if (work := self._fork(k)) is not None:
                        return work
            if time.monotonic() - looked_at >= LOOK_S:
                self._look()
                looked_at = time.monotonic()
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(self._said, msgspec.json.encode(self._health()) + b"\n")
            ready, _, _ = select.select([0, wake.fileno()], [], [], LOOK_S)
            if wake.fileno() in ready:
                wake.recv(1 << 12)
            if 0 in ready and not self._read_changes():
                self._end(0.0)  # whoever has started it is gone
                return None
        self._end(STOP_S)
        return None

    def _fork(self, k: int) -> tuple[int, socket.socket] | None:
        keeper, (ours, theirs) = os.getpid(), socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            ours.setblocking(False)
            self.workers[k : k + 1] = [Worker(pid, ours)]
            self.starts += 1
            return None
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        os.close(self._said)
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(each, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return k, theirs

    def _look(self) -> None:
        for worker in self.workers:
            if self.is_heard(worker):
                worker.heard_at, worker.unheard = time.monotonic(), 0
            else:
                worker.unheard += 1
                silent_s = time.monotonic() - worker.heard_at
                if worker.heard_at and worker.unheard > 1 and silent_s > self.task.hung_s:
                    log.error("a process of the cluster is silent and is started again")
                    os.kill(worker.pid, signal.SIGKILL)  # a stopped process would react to nothing else

    def _health(self) -> Health:
        by_model: dict[str, int] = {}
        for worker in self.workers:
            for name, count in msgspec.json.decode(worker.said, type=dict[str, int]).items():
                by_model[name] = by_model.get(name, 0) + count
        alive = all(worker.heard_at for worker in self.workers)
        return Health(pids=[each.pid for each in self.workers], starts=self.starts, alive=alive, by_model=by_model)

    def _read_changes(self) -> bool:
        """Takes a line of changes from standard input and passes it on; False: there will be no more."""
        with open(0, "rb", buffering=0, closefd=False) as file:
            data = file.readline()
        for name, value in msgspec.json.decode(data or b"{}").items():
            setattr(self.task, name, value)
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.channel.send(data)
        return bool(data)

    def _end(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        for number in (signal.SIGTERM, signal.SIGKILL) if within_s else (signal.SIGKILL,):
            for worker in self.workers:
                os.kill(worker.pid, number)
            while self.workers and (time.monotonic() < until or number == signal.SIGKILL):
                self.workers = [each for each in self.workers if not os.waitpid(each.pid, os.WNOHANG)[0]]
                time.sleep(0.02)


def heard_over_channel(worker: Worker) -> bool:
    """Whether it has sent lines; keeps the last."""
    try:
        data = worker.channel.recv(1 << 20)
    except OSError:
        return False
    *lines, _ = data.split(b"\n")
    worker.said = lines[-1] if lines else worker.said
    return bool(lines)


def heard_over_http(task: EngineTask) -> Callable[[Worker], bool]:
    """Whether the server answers within half of `hung_s`: a busy machine's server is slow, not silent."""

    def ask(worker: Worker) -> bool:
        connection = http.client.HTTPConnection(task.host, task.port, timeout=max(ASK_S, task.hung_s / 2))
        try:
            connection.request("GET", "/v2/health/live")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return ask


# -- the workers


def run_engine(task: EngineTask) -> None:
    serve_config(_config(task), Source(str(Path(task.folder) / "cluster.toml")))


def _config(task: EngineTask) -> Config:
    models = [
        {**each, "name": name, "load": name in task.loaded}
        for each, name in zip(task.config["models"], task.names, strict=True)
    ]
    server = {**task.config.get("server", {}), "host": task.host, "port": task.port, "model_control": True}
    return load_config(options={**task.config, "models": models, "server": server})[0]


async def run_router(task: RouterTask, k: int, channel: socket.socket) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listening = socket.socket(fileno=task.descriptors[k])
    router = Router(RouterOptions(**task.options), task.models)

    def set_engines(engines: dict[str, str]) -> None:
        router.set_members(Member(name, url) for name, url in engines.items())

    async def change() -> None:
        while line := await reader.readline():
            set_engines(msgspec.json.decode(line)["engines"])

    async def beat() -> None:
        while True:
            writer.write(msgspec.json.encode(router.counts.by_model) + b"\n")
            await asyncio.sleep(BEAT_S)

    set_engines(task.engines)
    reader, writer = await asyncio.open_connection(sock=channel)
    tasks = [asyncio.create_task(change())]
    while task.waits and not (router.ready or router.knows_all or stop.is_set()):
        await asyncio.sleep(0.01)
    door = FrontDoor(router, listening)
    await door.start()
    tasks.append(asyncio.create_task(beat()))
    try:
        await stop.wait()
    finally:
        for each in tasks:
            each.cancel()
        await door.stop()


def main() -> None:
    task: Task = msgspec.json.decode(os.environ.pop(VARIABLE), type=Task)
    configure("text", "info")
    if isinstance(task, EngineTask):
        config = _config(task)
        warm_up(build_policy(config, Source(str(Path(task.folder) / "cluster.toml"))))
        import_device(config.device)  # opens no GPU
        keeper = Keeper(task, heard_over_http(task))
    else:
        keeper = Keeper(task, heard_over_channel, len(task.descriptors))
    gc.freeze()  # a collection would write to the pages that keeper and workers share
    work = keeper.run()
    if work is None:
        return
    if isinstance(task, EngineTask):
        run_engine(task)
        return
    keep_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_router(task, *work))


if __name__ == "__main__":
    main()
