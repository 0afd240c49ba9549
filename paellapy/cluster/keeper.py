"""`python -m paellapy.cluster.keeper`: keeps an engine's server or routers alive. Its task is in its environment."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from importlib import import_module
from pathlib import Path

import msgspec

from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.processes import EngineTask, RouterTask, answers
from paellapy.cluster.router import Router, RouterOptions
from paellapy.serving.api import serve_config
from paellapy.serving.build import build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.loading import import_device, warm_up
from paellapy.serving.logs import configure
from paellapy.serving.preflight import keep_memory, loop_factory
from paellapy.serving.workers.keeper import VARIABLE, Keeper, heard_over_channel

BEAT_S = 0.1  # between two signs of a router to its keeper
LEAST_S = 0.5  # for a server's answer to its keeper


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
    task: EngineTask | RouterTask = msgspec.json.decode(os.environ.pop(VARIABLE), type=EngineTask | RouterTask)
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
