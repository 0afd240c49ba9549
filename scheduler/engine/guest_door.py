"""How other processes find an engine: a socket in a folder of this user's, named after the engine's process."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from pathlib import Path

from paellapy.instrument.errors import PaellaError

_numbers = itertools.count()


class NoEngineError(PaellaError):
    """No engine was found that accepts guests."""


def runtime_folder() -> Path:
    """The folder $PAELLAPY_RUNTIME_DIR, or a private folder of this user."""
    given = os.environ.get("PAELLAPY_RUNTIME_DIR")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) if given else Path(base or tempfile.gettempdir()) / f"paellapy-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise NoEngineError(f"{folder} belongs to another user: set PAELLAPY_RUNTIME_DIR to a folder that you own")
    return folder


def listen() -> tuple[socket.socket, Path]:
    """A socket on which guests reach an engine of this process."""
    path = runtime_folder() / f"engine-{os.getpid()}-{next(_numbers)}.sock"
    path.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(str(path))
        path.chmod(0o600)
        door.listen(16)
    except OSError:
        door.close()
        raise
    return door, path


def sweep() -> None:
    """Removes the sockets of processes that ended without removing them."""
    for path in runtime_folder().glob("*engine-*.sock"):
        pid = path.name.partition("engine-")[2].partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def engines() -> list[Path]:
    """The sockets of engines, newest first."""
    found = []
    for path in runtime_folder().glob("engine-*.sock"):
        with contextlib.suppress(OSError):  # the engine left meanwhile
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def knock(engine: str | None = None) -> socket.socket:
    """A connection to an engine: the newest one, the engine of a given process, or the engine at a given path."""
    if engine is None:
        candidates = engines()
    elif "/" in engine:
        candidates = [Path(engine)]
    else:
        candidates = [path for path in engines() if path.name.split("-")[1] == engine]
    for path in candidates:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(str(path))
            return line
        except OSError:
            line.close()
            if engine is None or "/" not in engine:
                with contextlib.suppress(OSError):
                    path.unlink()  # left behind by an engine that did not close
    which = "of this user" if engine is None else f"at {engine!r}"
    raise NoEngineError(
        f"no engine {which} runs on this machine: start one (pp.Engine, paellapy serve), or name its process or socket "
        "with --engine"
    )
