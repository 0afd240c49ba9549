"""A server with workers, in separate processes, for tests that ask, kill and watch it. Also the program they run."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Processes:
    """A supervisor, its engine and its workers."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log
        self.address = url.partition("://")[2]
        self.port = int(self.address.rpartition(":")[2])

    def lines(self) -> list[dict[str, Any]]:
        """The log lines so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def said(self) -> str:
        return self._log.read_text()

    def pids(self, name: str) -> list[int]:
        """Ids of the processes with that name: engine, work1, work2."""
        found = []
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == f"paellapy-{name}":
                    found.append(pid)
        return found

    def kill(self, name: str) -> int:
        (pid,) = self.pids(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls until the condition holds; the test's own timeout limits it."""
        pause = threading.Event()
        while not condition():
            assert self.process.poll() is None, self.said()
            pause.wait(0.02)


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def processes(models: str, workers: int = 2, **options: Any) -> Iterator[Processes]:
    """Serves the models of the function `module:name`, or a configuration file; killed at the end if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, __file__, models, str(workers), json.dumps(options)]
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        pids: list[int] = []
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url, log.read_text()
            yield Processes(process, url, log)
        finally:
            pids = children(process.pid)
            process.kill()
            process.communicate()
            wait_for_end(pids)


def wait_for_end(pids: list[int]) -> None:
    """Waits until they end by themselves, since their parent is dead."""
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def main() -> None:
    import paellapy as pp
    from paellapy.serving.workers import supervisor

    def announce(url: str) -> None:
        print(url, flush=True)

    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    supervisor.STANDBY_AFTER_S = options.pop("standby_after_s", supervisor.STANDBY_AFTER_S)
    if sys.argv[1].endswith(".toml"):
        pp.serve(sys.argv[1], workers=int(sys.argv[2]), announce=announce)
        return
    module, _, name = sys.argv[1].partition(":")
    models = getattr(importlib.import_module(module), name)()
    server = {
        "port": 0,
        "grace_s": 0.2,
        "drain_s": 20.0,
        "log_format": "json",
        "standby": "off",
        **options.pop("server", {}),
    }
    pp.serve(models, workers=int(sys.argv[2]), server=server, announce=announce, device="virtual:h200", **options)


if __name__ == "__main__":
    main()
