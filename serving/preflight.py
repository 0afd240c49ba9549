"""Checks of the machine before the server starts, so that a problem is reported clearly and early."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from paellapy.instrument.errors import PaellaError
from paellapy.serving.logs import log

LEAST_DESCRIPTORS = 256
_FOLDER = re.compile(r"paellapy-(\d+)-(\d+)-.*")


def check_machine() -> None:
    """Raises PaellaError where the server cannot work; warns where it would be slow."""
    _allow_descriptors()
    for folder, remedy in _caches():
        if (why := _unwritable(folder)) is not None:
            said = f"compiled kernels cannot be stored in {folder} ({why}): set {remedy} to a writable folder with room"
            log.warning(said)


def _allow_descriptors() -> None:
    """Raises the limit on open files as far as this process may; PaellaError if that is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        said = f"this process may open only {soft} files and connections, and a server needs {LEAST_DESCRIPTORS}"
        raise PaellaError(
            f"{said}: raise the limit (ulimit -n 65536, or LimitNOFILE= of a systemd unit)",
            field="RLIMIT_NOFILE", limit=LEAST_DESCRIPTORS, given=soft,
        )  # fmt: skip


def _caches() -> Iterator[tuple[Path, str]]:
    from paellapy.instrument.cache import cache_dir, protect_triton

    protect_triton()
    yield cache_dir(), "PAELLAPY_CACHE_DIR"
    given = os.environ.get("TRITON_CACHE_DIR")
    try:
        yield Path(given) if given else Path.home() / ".triton" / "cache", "TRITON_CACHE_DIR"
    except RuntimeError:
        log.warning("this user has no home folder: set TRITON_CACHE_DIR to a folder for Triton's compiled kernels")


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be written; None: it can."""
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
    """A temporary folder for the life of this process. Folders of servers that were killed are removed."""
    for each in Path(tempfile.gettempdir()).glob("paellapy-*"):
        found = _FOLDER.fullmatch(each.name)
        with contextlib.suppress(OSError):
            if found and each.stat().st_uid == os.getuid() and not is_alive(int(found[1]), found[2]):
                shutil.rmtree(each, ignore_errors=True)
    try:
        made = tempfile.TemporaryDirectory(prefix=f"paellapy-{os.getpid()}-{born(os.getpid())}-")
    except OSError as e:
        where = tempfile.gettempdir()
        said = f"cannot make a temporary folder in {where}: {e.strerror}; free space there, or set TMPDIR to another"
        raise PaellaError(said, field="TMPDIR", given=where) from e
    with made as name:
        yield Path(name)


def born(pid: int) -> str:
    """Start time of a process: together with its number it identifies the process, since numbers are reused."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_alive(pid: int, since: str) -> bool:
    try:
        return born(pid) == since
    except OSError:
        return False


# Settings of a process that serves: its event loop, its memory, its garbage, and its interpreter lock.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
SWITCH_S = 2e-4  # the interpreter's default of 5 ms would be added to requests while a thread makes metrics


def share_interpreter() -> None:
    """Makes threads beside the event loop give the interpreter back sooner."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


def keep_memory() -> None:
    """Keeps freed memory: request bodies of some hundred KB come and go, and returning it to the system costs time."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


_sparing = False  # whether this process spares its objects: not before its start is over, and not in others' servers


def spare_objects() -> None:
    """Takes all objects of the start out of the garbage collector's search: one search of the modules and models would
    stop the event loop for a tenth of a second, in the middle of serving.
    """
    global _sparing
    _sparing = True
    gc.collect()
    gc.freeze()


def spare_more_objects() -> None:
    """Spares also the objects of a model that was loaded after the start. The collector searches only objects that are
    not spared yet; after an unload these are all.
    """
    if _sparing:
        spare_objects()


def search_all_objects() -> None:
    """Lets the collector find a model that is unloaded: its objects may refer to each other."""
    gc.unfreeze()


def stop_sparing() -> None:
    """Lets the interpreter free everything when it ends."""
    global _sparing
    _sparing = False
    gc.unfreeze()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed."""
    try:
        import uvloop
    except ImportError:  # on Windows, or not installed
        return None
    return uvloop.new_event_loop
