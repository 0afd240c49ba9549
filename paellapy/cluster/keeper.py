"""`python -m paellapy.cluster.keeper`: keeps an engine's server or routers alive.

A *keeper* gets a task in its environment, imports and compiles everything, and then forks the workers that do the task.
A worker that ends, or falls silent, is forked again at once, without the slow part of a start; keeper and workers share
their memory. Lines of JSON on the keeper's standard input change its task, and lines on its standard output say how its
workers are. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgspec

from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.processes import STOP_S, VARIABLE, EngineTask, Health, RouterTask, Task, answers
from paellapy.cluster.router import Router, RouterOptions
from paellapy.scheduler.core.processes import die_with_parent
from paellapy.serving.api import serve_config
from paellapy.serving.build import build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure, log
from paellapy.serving.preflight import keep_memory, loop_factory

LOOK_S = 0.2
BEAT_S = 0.1  # between two signs of a router to its keeper
LEAST_S = 0.5  # for a server's answer to its keeper


@dataclass(slots=True)
class Worker:
    """A forked process. `heard_at`: when it was last heard; 0: not yet."""

    process: ForkProcess
    channel: socket.socket
    heard_at: float = 0.0
    unheard: int = 0


Work = Callable[[int, socket.socket], None]


class Keeper:
    """Forks workers, each of which calls `work` with its number and its channel. `is_heard` asks whether one is well.
    A late answer may have the machine's suspension as its cause, so a worker counts as silent from the second on.
    """

    def __init__(self, task: Task, work: Work, is_heard: Callable[[Worker], bool], number: int = 1) -> None:
        self._task, self._work, self._is_heard, self._number = task, work, is_heard, number
        self._workers: list[Worker] = []
        self._starts, self._said = 0, -1

    def run(self) -> None:
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        self._said = os.dup(1)
        os.dup2(2, 1)  # models may print
        os.set_blocking(self._said, False)
        looked_at = 0.0
        self._workers = [self._fork(k) for k in range(self._number)]
        while not stop:
            for k, worker in enumerate(self._workers):
                if not worker.process.is_alive():
                    worker.channel.close()
                    log.error("a process of the cluster ended and is started again")
                    self._workers[k] = self._fork(k)
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                self._look()
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(self._said, msgspec.json.encode(self._health()) + b"\n")
            if 0 in wait([0, *(each.process.sentinel for each in self._workers)], LOOK_S) and not self._read_changes():
                self._end(0.0)  # whoever has started it is gone
                return
        self._end(STOP_S)

    def _fork(self, k: int) -> Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process = get_context("fork").Process(target=self._begin, args=(k, theirs, os.getpid()))
        process.start()
        theirs.close()
        self._starts += 1
        return Worker(process, ours)

    def _begin(self, k: int, channel: socket.socket, keeper: int) -> None:
        die_with_parent(signal.SIGKILL)
        os.close(self._said)
        if os.getppid() == keeper:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._work(k, channel)

    def _look(self) -> None:
        for worker in self._workers:
            if self._is_heard(worker):
                worker.heard_at, worker.unheard = time.monotonic(), 0
            else:
                worker.unheard += 1
                silent_s = time.monotonic() - worker.heard_at
                if worker.heard_at and worker.unheard > 1 and silent_s > self._task.hung_s:
                    log.error("a process of the cluster is silent and is started again")
                    worker.process.kill()  # a stopped process would react to nothing else

    def _health(self) -> Health:
        pids = [each.process.pid or 0 for each in self._workers]
        return Health(pids=pids, starts=self._starts, alive=all(each.heard_at for each in self._workers))

    def _read_changes(self) -> bool:
        """Takes a line of changes from standard input and passes it on; False: there will be no more."""
        with open(0, "rb", buffering=0, closefd=False) as file:
            data = file.readline()
        for name, value in msgspec.json.decode(data or b"{}").items():
            setattr(self._task, name, value)
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.send(data)
        return bool(data)

    def _end(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        for worker in self._workers:
            (worker.process.terminate if within_s else worker.process.kill)()
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.join()


def heard_over_channel(worker: Worker) -> bool:
    with contextlib.suppress(OSError):
        return bool(worker.channel.recv(1 << 16))
    return False


def heard_over_http(task: EngineTask) -> bool:
    """Whether the server answers within half of `hung_s`: a busy machine's server is slow, not silent."""
    return answers(f"http://{task.host}:{task.port}/v2/health/live", max(LEAST_S, task.hung_s / 2))


# -- the workers


def run_engine(task: EngineTask) -> None:
    os.environ.setdefault("PAELLAPY_QUIET", "1")  # its log says the same, and a line of progress would import Rich
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
    router = Router(RouterOptions(**task.options), task.models)

    async def change() -> None:
        while line := await reader.readline():
            router.set_engines(msgspec.json.decode(line)["engines"])

    async def beat() -> None:
        while True:
            writer.write(b".")
            await asyncio.sleep(BEAT_S)

    router.set_engines(task.engines)
    reader, writer = await asyncio.open_connection(sock=channel)
    tasks = [asyncio.create_task(change())]
    while task.waits and not (router.ready or router.knows_all or stop.is_set()):
        await asyncio.sleep(0.01)
    door = FrontDoor(router, socket.socket(fileno=task.descriptors[k]))
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
    loop_factory()  # imports what workers share
    if isinstance(task, EngineTask):
        config = _config(task)
        warm_up(build_policy(config, Source(str(Path(task.folder) / "cluster.toml"))))
        import_device(config.device)  # opens no GPU
        import_module("paellapy.serving.server")
        keeper = Keeper(task, lambda k, channel: run_engine(task), lambda worker: heard_over_http(task))
    else:

        def route(k: int, channel: socket.socket) -> None:
            keep_memory()
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run_router(task, k, channel))

        keeper = Keeper(task, route, heard_over_channel, len(task.descriptors))
    gc.freeze()  # a collection would write to the pages that keeper and workers share
    keeper.run()


if __name__ == "__main__":
    main()
