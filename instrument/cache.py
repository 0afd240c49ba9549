"""Compiled results on disk: one file per key, written atomically, so that a second process starts faster."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from paellapy.instrument.private_folders import trusted


def cache_dir() -> Path:
    """The folder of compiled results: $PAELLAPY_CACHE_DIR, otherwise the user's cache directory."""
    if configured := os.environ.get("PAELLAPY_CACHE_DIR"):
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
    if not trusted(cache_dir()):
        return None
    try:
        data = (cache_dir() / key[:2] / key).read_bytes()
    except OSError:
        return None
    # A file truncated by a full disk must not be taken for a result.
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def write(key: str, data: bytes) -> None:
    """Stores `data` under `key`. Errors are ignored: without a cache, only time is lost."""
    folder = cache_dir() / key[:2]
    if not trusted(cache_dir()):
        return
    with contextlib.suppress(OSError):
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as f:
            try:
                f.write(hashlib.sha256(data).digest() + data)
                f.flush()
                os.replace(f.name, folder / key)
            except OSError:
                os.unlink(f.name)
