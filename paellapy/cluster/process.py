"""Child processes: started with all their facts in the environment, ended with this process, restarted if needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

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
