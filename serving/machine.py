"""What a server needs of its machine, looked at before it starts: one clear sentence instead of an odd error later."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paellapy.instrument.errors import PaellaError
from paellapy.serving.logs import log

LEAST_DESCRIPTORS = 256
_FOLDER = re.compile(r"paellapy-(\d+)-(\d+)-.*")


def check_machine() -> None:
    """PaellaError where it cannot work; a warning where it will be slow or odd."""
    _allow_descriptors()
    for folder, remedy in _caches():
        if (why := _unwritable(folder)) is not None:
            said = f"compiled kernels cannot be kept in {folder} ({why}): set {remedy} to a folder that can be written"
            log.warning(said)


def _allow_descriptors() -> None:
    """As many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        raise PaellaError(
            f"this process may open {soft} files, connections among them, and a server needs {LEAST_DESCRIPTORS}: "
            "raise the limit (ulimit -n 65536, or LimitNOFILE= of a systemd unit)"
        )


def _caches() -> Iterator[tuple[Path, str]]:
    from paellapy.instrument.cache import cache_dir

    yield cache_dir(), "PAELLAPY_CACHE_DIR"
    given = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield Path(given) if given else Path.home() / ".triton" / "cache", "TRITON_CACHE_DIR"
    except RuntimeError:
        log.warning("this user has no home: set TRITON_CACHE_DIR, where Triton keeps compiled kernels")


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be kept there; None: something can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as e:
        return e.strerror or str(e)
    return None


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for as long as this process serves. What killed ones have left behind is removed."""
    for each in Path(tempfile.gettempdir()).glob("paellapy-*"):
        found = _FOLDER.fullmatch(each.name)
        with contextlib.suppress(OSError):
            if found and each.stat().st_uid == os.getuid() and not is_alive(int(found[1]), found[2]):
                shutil.rmtree(each, ignore_errors=True)
    try:
        made = tempfile.TemporaryDirectory(prefix=f"paellapy-{os.getpid()}-{born(os.getpid())}-")
    except OSError as e:
        said = f"no temporary folder can be made in {tempfile.gettempdir()}: {e.strerror}"
        raise PaellaError(f"{said}; make room, or set TMPDIR to another folder") from None
    with made as name:
        yield Path(name)


def born(pid: int) -> str:
    """When a process began: its number may be another's by now."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_alive(pid: int, since: str) -> bool:
    try:
        return born(pid) == since
    except OSError:
        return False
