"""Caches of Triton and PyTorch: moved to a folder of ours where another user can write to theirs."""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from paellapy.instrument.cache import cache_dir
from paellapy.instrument.private_folders import refusal, remedy, weak_place


def protect_triton() -> None:
    """Before Triton compiles or loads anything: it keeps its launchers as libraries, which it loads."""
    _protect("TRITON_CACHE_DIR", _triton_default)


def protect_inductor() -> None:
    """Before `torch.compile`. PyTorch's folder has a name that anybody can guess and make, below the temporary one."""
    protect_triton()
    _protect("TORCHINDUCTOR_CACHE_DIR", _inductor_default)


def _protect(variable: str, default: Callable[[], Path]) -> None:
    given = os.environ.get(variable)
    try:
        folder = Path(given) if given else default()
    except RuntimeError:  # a user without a home directory
        return
    _check(variable, folder)


@functools.cache
def _check(variable: str, folder: Path) -> None:
    with contextlib.suppress(OSError):  # at once, so that nobody else can make it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (through := weak_place(folder)) is None:
        return
    for own in _own(variable):  # the last one even if it is weak: nobody knew its name before
        os.environ[variable] = str(own)
        if weak_place(own) is None:
            break
    warnings.warn(
        f"{refusal(folder, through)}; {os.environ[variable]} is used instead: {remedy(through, variable)}", stacklevel=4
    )


def _own(variable: str) -> Iterator[Path]:
    """Folders to use instead: below our own cache, else until this process ends."""
    kept = cache_dir() / variable.partition("_")[0].lower()
    with contextlib.suppress(OSError):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield kept
    made = tempfile.mkdtemp(prefix="paellapy-")
    atexit.register(_remove, made, os.getpid())
    yield Path(made)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _triton_default() -> Path:
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _inductor_default() -> Path:
    """As torch._inductor.runtime.cache_dir_utils has it."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", name))
