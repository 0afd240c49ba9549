"""Weights off the GPU: in the host's memory up to a budget, beyond it in files.

Who has to give way to a new one was brought to the GPU least recently. Its file is written once: weights do not change.
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
    host: Any = None  # a block of the host's memory, with an array `.host` over it
    file: Path | None = None


@dataclass(slots=True)
class HostStore:
    """`allocate` gives a block of memory with an array `host` and a method `free`: pinned, for a GPU."""

    budget_bytes: int
    allocate: Callable[[int], Any]
    folder: Path | None = None  # of files; None: a temporary one
    file_bytes: int = field(default=0, init=False)
    held_bytes: int = field(default=0, init=False)
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)  # least recently brought first
    _own: bool = field(default=False, init=False)  # whether the folder goes with the store

    def put(self, name: str, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        """Room for a model's weights, written by `fill`."""
        if name in self._kept:
            raise MemoryPlanError(f"the weights of {name!r} are kept already")
        kept = _Kept(nbytes)
        if nbytes <= self.budget_bytes:
            self._make_room(nbytes)
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
            self._write(name, kept, array)
        self._kept[name] = kept

    def take(self, name: str) -> Bytes:
        """The weights, to be brought to the GPU: in pinned memory if there is room, else mapped from their file."""
        kept = self._kept.pop(name)
        self._kept[name] = kept  # the most recent
        if kept.host is not None:
            return kept.host.host[: kept.nbytes]  # type: ignore[no-any-return]
        assert kept.file is not None
        mapped = map_weights(kept.file).get("weights")
        if mapped is None or mapped.nbytes != kept.nbytes:
            raise WeightFileError(f"{kept.file} does not hold the weights of {name!r} any more")
        if self.held_bytes + kept.nbytes > self.budget_bytes:
            return mapped
        kept.host = self.allocate(kept.nbytes)
        kept.host.host[: kept.nbytes] = mapped
        self.held_bytes += kept.nbytes
        return kept.host.host[: kept.nbytes]  # type: ignore[no-any-return]

    def where(self, name: str) -> str:
        return "host" if self._kept[name].host is not None else "disk"

    def drop(self, name: str) -> None:
        """Forget a model's weights."""
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

    def _make_room(self, nbytes: int) -> None:
        for name, kept in self._kept.items():
            if self.held_bytes + nbytes <= self.budget_bytes:
                return
            if kept.host is not None:
                if kept.file is None:
                    self._write(name, kept, kept.host.host[: kept.nbytes])
                self._release(kept)

    def _release(self, kept: _Kept) -> None:
        if kept.host is not None:
            kept.host.free()
            kept.host = None
            self.held_bytes -= kept.nbytes

    def _write(self, name: str, kept: _Kept, array: Bytes) -> None:
        if self.folder is None:
            self.folder, self._own = Path(tempfile.mkdtemp(prefix="paellapy-weights-")), True
        if shutil.disk_usage(self.folder).free < kept.nbytes:
            free = shutil.disk_usage(self.folder).free
            raise MemoryPlanError(
                f"the weights of {name!r} fit neither into the host's memory ({readable_bytes(self.held_bytes)} of "
                f"{readable_bytes(self.budget_bytes)} used, host_bytes) nor onto the disk under {self.folder} "
                f"({readable_bytes(free)} free, {readable_bytes(kept.nbytes)} needed)"
            )
        path = self.folder / f"{len(list(self.folder.iterdir()))}-{abs(hash(name))}.safetensors"
        write_weights(path, {"weights": array})
        kept.file = path
        self.file_bytes += kept.nbytes
