"""Compiled results on disk: one file per key, in a folder that no other user can write to.

Triton and PyTorch keep compiled code in folders too. These are replaced by folders of ours if others can write there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import hashlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from paellapy.instrument.errors import FolderWarning

OWN = "PAELLAPY_CACHE_DIR"


def cache_dir() -> Path:
    """The folder of compiled results: $PAELLAPY_CACHE_DIR, otherwise the user's cache directory."""
    if configured := os.environ.get(OWN):
        return Path(configured)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "paellapy"
    try:
        return Path.home() / ".cache" / "paellapy"
    except RuntimeError:  # a user without a home directory, as in some containers
        return Path(tempfile.gettempdir()) / f"paellapy-{os.getuid()}"


def digest(*parts: str | bytes) -> str:
    """A key for results that depend only on `parts`."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
        h.update(data)
    return h.hexdigest()


def read(key: str) -> bytes | None:
    """The data stored under `key`, or None."""
    if not trusted(cache_dir(), OWN):
        return None
    try:
        data = (cache_dir() / key[:2] / key).read_bytes()
    except OSError:
        return None
    # A file truncated by a full disk must not be taken for a result.
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def write(key: str, data: bytes) -> None:
    """Stores `data` under `key`, at once or not at all. Errors are ignored: without a cache, only time is lost."""
    folder = cache_dir() / key[:2]
    if not trusted(cache_dir(), OWN):
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as f:
            try:
                f.write(hashlib.sha256(data).digest() + data)
                f.flush()
                os.replace(f.name, folder / key)
            except OSError:
                os.unlink(f.name)


@functools.cache
def trusted(folder: Path, variable: str) -> bool:
    """Whether a folder is ours and nobody else can write to it; if not, a warning names the variable to set.

    The folder is made if it is missing. Its files are executed, and nobody can make a folder that belongs to us.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found, name = folder.stat(), folder.lstat()
    except OSError:  # it is missing and cannot be made: nothing will be read from it
        return True
    ours = {0, os.getuid()}
    alone = found.st_gid == 0 or found.st_gid == os.getgid() == os.getuid()  # many systems give each user a group
    if {found.st_uid, name.st_uid} <= ours and not found.st_mode & (0o002 if alone else 0o022):
        return True
    text = (
        f"{folder} can be written by other users, so it is not used for code: run chmod go-w on it if it is yours, or "
        f"set {variable} to a folder of your own"
    )
    warnings.warn(FolderWarning(text, field=variable, given=folder), stacklevel=2)
    return False


# --- folders of Triton and PyTorch ----------------------------------------------------------------------------------


def protect_triton() -> None:
    """Before Triton compiles or loads anything: it keeps its launchers as libraries, which it loads."""
    _protect("TRITON_CACHE_DIR", lambda: Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")


def protect_inductor() -> None:
    """Before `torch.compile`. PyTorch's folder has a name that anybody can guess and make, below the temporary one."""
    protect_triton()
    _protect("TORCHINDUCTOR_CACHE_DIR", _inductor_folder)


def _inductor_folder() -> Path:
    """As torch._inductor.runtime.cache_dir_utils has it."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", name))


def _protect(variable: str, default: Callable[[], Path]) -> None:
    given = os.environ.get(variable)
    try:
        folder = Path(given) if given else default()
    except RuntimeError:  # a user without a home directory
        return
    if not trusted(folder, variable):
        os.environ[variable] = str(_private(variable.partition("_")[0].lower()))


def _private(name: str) -> Path:
    """A folder below our own cache, or one that lasts as long as this process."""
    kept = cache_dir() / name
    if trusted(cache_dir(), OWN) and trusted(kept, OWN) and os.access(kept, os.W_OK):
        return kept
    made = tempfile.mkdtemp(prefix="paellapy-")
    atexit.register(_remove, made, os.getpid())
    return Path(made)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
