"""Steps of a training process that prints their number and the time, a line each, again and again."""

from __future__ import annotations

import subprocess
import threading
import time


class Steps:
    """How many steps a process has made by when. It reads the process's output from now on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._said: list[tuple[int, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = line.split()
            if len(said) == 2:  # the last line of one that is killed may be cut
                self._said.append((int(said[0]), float(said[1])))

    @property
    def counts(self) -> int:
        """How often the process has said its number of steps."""
        return len(self._said)

    @property
    def made(self) -> int:
        return self._said[-1][0] if self._said else 0

    def speed(self, since: float, until: float, late_s: float = 0.1) -> float:
        """Steps a second between two times. Lines may come `late_s` after the step."""
        time.sleep(late_s)
        within = [each for each in list(self._said) if since <= each[1] <= until]
        return 0.0 if len(within) < 2 else (within[-1][0] - within[0][0]) / (within[-1][1] - within[0][1])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
