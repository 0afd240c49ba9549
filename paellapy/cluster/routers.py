"""Router processes that share one port, in front of a fixed list of engines. One that ends is restarted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict

from paellapy.cluster.process import ends_within, start
from paellapy.cluster.router import RouterOptions
from paellapy.cluster.tasks import RouterTask, given
from paellapy.cluster.view import Member
from paellapy.instrument.errors import ArgumentError
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.logs import log

LOOK_S = 0.2
MODULE = "paellapy.cluster.router_process"


class Routers:
    """`number` routers on one port; they do not know of each other."""

    def __init__(self, engines: Mapping[str, str], options: RouterOptions, number: int = 1) -> None:
        if not engines:
            raise ArgumentError("a router needs engines: give the address of each, as in http://127.0.0.1:8001")
        if len({Member(name, url).address for name, url in engines.items()}) < len(engines):
            raise ArgumentError("two engines have the same address: list each engine once")
        if number < 1:
            raise ArgumentError(f"there cannot be {number} routers: give 1 or more")
        self._engines, self._options = dict(engines), options
        self._shares = Shares(options.host, options.port, number)
        self.url = url_of(self._shares.address, tls=False)
        self.processes = [self._start(k) for k in range(number)]

    def _start(self, k: int) -> subprocess.Popen[bytes]:
        descriptor = self._shares[k].fileno()
        task = RouterTask(engines=self._engines, options=asdict(self._options), descriptor=descriptor)
        return start(MODULE, given(task), [descriptor])

    def look(self) -> None:
        """Restarts routers that have ended. Their sockets stay open, so that new connections wait there meanwhile."""
        for k, process in enumerate(self.processes):
            if process.poll() is not None:
                log.error("a router ended and is being restarted", extra={"fields": {"code": process.returncode}})
                self.processes[k] = self._start(k)

    def close(self) -> None:
        self._shares.close()
        ends_within(self.processes, self._options.drain_s + 2.0)

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
