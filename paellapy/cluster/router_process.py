"""One router as a process: `python -m paellapy.cluster.router_process`, started by `routers.py`."""

from __future__ import annotations

import asyncio
import signal
import socket

from paellapy.cluster.cluster_file import RouterTask, taken
from paellapy.cluster.engine_state import Member
from paellapy.cluster.listener import FrontDoor
from paellapy.cluster.router import Router, RouterOptions
from paellapy.serving.logs import configure
from paellapy.serving.preflight import keep_memory, loop_factory


async def _run(task: RouterTask) -> None:
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
    configure("text", "info")
    keep_memory()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_run(taken(RouterTask)))


if __name__ == "__main__":
    main()
