"""Weights that are not on the GPU: in host memory up to a budget, and in files beyond it.

New weights displace the weights that were brought to the GPU least recently. A model's file is written once, because
weights do not change.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models.sizes import readable_bytes
from paellapy.scheduler.models.weight_files import WeightFileError, map_weights, write_weights

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class _Kept:
    nbytes: int
    host: Any = None  # a block of host memory, with an array `.host` over it
    file: Path | None = None


@dataclass(slots=True)
class HostStore:
    """`allocate` returns a block of memory with an array `host` and a method `free`; for a GPU the memory is pinned."""

    budget_bytes: int
    allocate: Callable[[int], Any]
    folder: Path | None = None  # folder of the files; None: a temporary one
    in_use: Callable[[str], bool] = lambda name: False  # whether the GPU may be copying from a model's host memory
    file_bytes: int = field(default=0, init=False)
    held_bytes: int = field(default=0, init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)  # in order of use, least recently brought first
    _own: bool = field(default=False, init=False)  # whether the folder is removed with the store

    def put(self, name: str, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        """Stores a model's weights, which `fill` writes."""
        if name in self._kept:
            raise MemoryPlanError(f"the weights of {name!r} are in the host store already; unload the model first")
        kept = _Kept(nbytes)
        if nbytes <= self.budget_bytes and self._make_room(name, nbytes):
            kept.host = self.allocate(nbytes)
            try:
                fill(kept.host.host[:nbytes])
            except BaseException:
                kept.host.free()
                raise
            self.held_bytes += nbytes
        else:
            array = np.empty(nbytes, np.uint8)
            fill(array)
            self._write(name, kept, array, f"the weights of model {name!r}")
        self._kept[name] = kept

    def take(self, name: str) -> Bytes:
        """The weights, to be brought to the GPU: in pinned memory if there is room, otherwise mapped from their file.
        """
        kept = self._kept.pop(name)
        self._kept[name] = kept  # now the most recent
        if kept.host is not None:
            return kept.host.host[: kept.nbytes]  # type: ignore[no-any-return]
        assert kept.file is not None
        mapped = map_weights(kept.file).get("weights")
        if mapped is None or mapped.nbytes != kept.nbytes:
            raise WeightFileError(
                f"{kept.file} no longer holds the weights of {name!r}: unload the model and load it again"
            )
        if self.held_bytes + kept.nbytes > self.budget_bytes:
            return mapped
        kept.host = self.allocate(kept.nbytes)
        kept.host.host[: kept.nbytes] = mapped
        self.held_bytes += kept.nbytes
        return kept.host.host[: kept.nbytes]  # type: ignore[no-any-return]

    def where(self, name: str) -> str:
        return "host" if self._kept[name].host is not None else "disk"

    def drop(self, name: str) -> None:
        """Removes a model's weights."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return
        self._release(kept)
        if kept.file is not None:
            with contextlib.suppress(OSError):
                kept.file.unlink()
            self.file_bytes -= kept.nbytes

    def close(self) -> None:
        for name in list(self._kept):
            self.drop(name)
        if self._own and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_room(self, new: str, nbytes: int) -> bool:
        """Whether there is room now. Memory that is being copied to the GPU stays, even if room is lacking then."""
        for name, kept in self._kept.items():
            if self.held_bytes + nbytes <= self.budget_bytes:
                break
            if kept.host is not None and not self.in_use(name):
                if kept.file is None:
                    why = f"to make room for model {new!r}, the weights of model {name!r}"
                    self._write(name, kept, kept.host.host[: kept.nbytes], why)
                self._release(kept)
        return self.held_bytes + nbytes <= self.budget_bytes

    def _release(self, kept: _Kept) -> None:
        if kept.host is not None:
            kept.host.free()
            kept.host = None
            self.held_bytes -= kept.nbytes

    def _write(self, name: str, kept: _Kept, array: Bytes, what: str) -> None:
        """`what` says in an error whose weights go to the disk, and for whom."""
        try:
            if self.folder is None:
                self.folder, self._own = Path(tempfile.mkdtemp(prefix="paellapy-weights-")), True
            free = shutil.disk_usage(self.folder).free
            path = self.folder / f"{len(list(self.folder.iterdir()))}-{abs(hash(name))}.safetensors"
        except OSError as e:
            raise WeightFileError(
                f"{what} must go to the disk, but {e.filename or 'the folder for temporary files'} cannot be used "
                f"({e.strerror}): set TMPDIR to a folder that can be written to, or raise host_bytes"
            ) from e
        if free < kept.nbytes:
            raise MemoryPlanError(
                f"{what} ({readable_bytes(kept.nbytes)}) must go to disk, because {readable_bytes(self.held_bytes)} "
                f"of host_bytes={readable_bytes(self.budget_bytes)} are in use; but {self.folder} has only "
                f"{readable_bytes(free)} free: raise host_bytes or free disk space"
            )
        try:
            write_weights(path, {"weights": array})
        except WeightFileError as e:
            raise WeightFileError(f"{what} must go to the disk: {e}") from e
        kept.file = path
        self.file_bytes += kept.nbytes
