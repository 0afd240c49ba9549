"""Child processes: started with all their facts in the environment, ended with this process, restarted if needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from paellapy.cluster.cluster_file import RouterTask, given
from paellapy.cluster.engine_state import Member
from paellapy.cluster.router import RouterOptions
from paellapy.instrument.errors import ArgumentError
from paellapy.serving.listening import Shares, url_of
from paellapy.serving.logs import log

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child before its program: the kernel ends it when the thread that started it ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    module: str, environment: Mapping[str, str], pass_fds: Sequence[int] = (), stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts `python -m module`. It ends with us, and has its own session, so that Ctrl-C reaches only us."""
    return subprocess.Popen(
        [sys.executable, "-m", module],
        pass_fds=list(pass_fds),
        env={**os.environ, **environment},
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


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Asks the process to stop, and kills it if it does not."""
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
    if process.poll() is None:
        process.kill()
    process.wait()


def ends_within(processes: Sequence[subprocess.Popen[bytes]], within_s: float) -> None:
    """Ends all processes at once."""
    for each in processes:
        if each.poll() is None:
            each.terminate()
    until = time.monotonic() + within_s
    for each in processes:
        end(each, max(0.0, until - time.monotonic()))


# Router processes that share one port, in front of a fixed list of engines. One that ends is restarted.


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
