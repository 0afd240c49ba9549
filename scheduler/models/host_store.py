"""`HostStore`: weights that are not on the GPU, in host memory up to a budget, and in files beyond it.

New weights displace the weights that were brought to the GPU least recently. Weights in a file take the place of less
valuable weights when they are in demand (`promote`). A model's file is written once, because weights do not change.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models.memory import readable_bytes
from paellapy.scheduler.models.weights import Bytes, WeightFileError, map_weights, write_weights

Worth = Callable[[str], float]  # the value of a model's bytes in host memory, per byte
# Promotion copies weights and may write files, so weights must be worth this many times the weights they displace;
# otherwise two models in equal demand would displace each other at each request. 2 is a guess.
MARGIN = 2.0


@dataclass(slots=True)
class _Kept:
    name: str
    nbytes: int
    host: Any = None  # a block of host memory, with an array `.host` over it
    file: Path | None = None
    busy: bool = False  # `promote` copies these bytes: the block and the file stay until it has


@dataclass(slots=True)
class HostStore:
    """`allocate` returns a block of memory with an array `host` and a method `free`; for a GPU the memory is pinned.

    Any thread may call; `promote` copies and writes without keeping the others waiting.
    """

    budget_bytes: int
    allocate: Callable[[int], Any]
    folder: Path | None = None  # folder of the files; None: a temporary one
    in_use: Callable[[str], bool] = lambda name: False  # whether the GPU may be copying from a model's host memory
    file_bytes: int = field(default=0, init=False)
    held_bytes: int = field(default=0, init=False)
    promoted: int = field(default=0, init=False)  # models moved from their files to host memory
    promoted_bytes: int = field(default=0, init=False)
    displaced: int = field(default=0, init=False)  # models that left host memory, for new models or promoted ones
    _kept: dict[str, _Kept] = field(default_factory=dict, init=False)  # in order of use, least recently brought first
    _own: bool = field(default=False, init=False)  # whether the folder is removed with the store
    _written: int = field(default=0, init=False)  # files so far, for their names
    _lock: threading.Condition = field(default_factory=threading.Condition, init=False)

    def put(self, name: str, nbytes: int, fill: Callable[[Bytes], None]) -> None:
        """Stores a model's weights, which `fill` writes."""
        with self._lock:
            if name in self._kept:
                raise MemoryPlanError(
                    f"the weights of {name!r} are in the host store already; unload the model first", model=name
                )
            kept = _Kept(name, nbytes)
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
                self._write(kept, array)
            self._kept[name] = kept

    def take(self, name: str) -> Bytes:
        """The weights, to be brought to the GPU: in host memory, or mapped from their file."""
        with self._lock:
            kept = self._kept.pop(name)
            self._kept[name] = kept  # now the most recent
            return kept.host.host[: kept.nbytes] if kept.host is not None else self._map(kept)

    def where(self, name: str) -> str:
        """`host` or `disk`; empty if the store does not have these weights."""
        with self._lock:
            kept = self._kept.get(name)
            return "" if kept is None else "disk" if kept.host is None else "host"

    def drop(self, name: str) -> None:
        """Removes a model's weights."""
        with self._lock:
            self._lock.wait_for(lambda: name not in self._kept or not self._kept[name].busy)
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

    # -- from files to host memory

    def promote(self, name: str, worth: Worth) -> bool:
        """Moves weights from their file to host memory, if there is room, or if they are worth much more than weights
        that can leave for them. Weights that the GPU may be copying do not leave. One thread calls this at a time.
        """
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.host is not None or kept.nbytes > self.budget_bytes:
                return False
            leaving = self._to_displace(kept, worth)
            if leaving is None:
                return False
            moving = [kept, *leaving]
            for each in moving:
                each.busy = True
        try:
            return self._exchange(kept, leaving)
        finally:
            with self._lock:
                for each in moving:
                    each.busy = False
                self._lock.notify_all()

    def _to_displace(self, new: _Kept, worth: Worth) -> list[_Kept] | None:
        """The least valuable weights that make room for others, which are worth more; None if there are none such."""
        need = self.held_bytes + new.nbytes - self.budget_bytes
        if need <= 0:
            return []
        can = [each for each in self._kept.values() if each.host is not None and not self._stays(each)]
        value = {each.name: worth(each.name) for each in can}
        chosen: list[_Kept] = []
        for each in sorted(can, key=lambda each: value[each.name]):
            if sum(one.nbytes for one in chosen) < need:
                chosen.append(each)
        for each in reversed(chosen[:]):  # a large one may have made others unnecessary
            if sum(one.nbytes for one in chosen) - each.nbytes >= need:
                chosen.remove(each)
        lost = sum(value[each.name] * each.nbytes for each in chosen)
        enough = sum(each.nbytes for each in chosen) >= need
        return chosen if enough and worth(new.name) * new.nbytes > MARGIN * lost else None

    def _exchange(self, new: _Kept, leaving: list[_Kept]) -> bool:
        """Copies without the lock: nobody frees what is busy."""
        source = self._map(new)
        for each in leaving:
            if each.file is None:
                self._write(each, each.host.host[: each.nbytes], new.name)
        with self._lock:
            left = self.held_bytes - sum(each.nbytes for each in leaving)
            if left + new.nbytes > self.budget_bytes or any(self.in_use(each.name) for each in leaving):
                return False  # a new model took the room meanwhile, or the GPU copies
            block = next((each.host for each in leaving if each.nbytes == new.nbytes), None)
            for each in leaving:
                self._release(each, but=block)
            self.displaced += len(leaving)
            self.held_bytes += new.nbytes
        try:
            block = self.allocate(new.nbytes) if block is None else block
            block.host[: new.nbytes] = source
        except BaseException:
            with self._lock:
                self.held_bytes -= new.nbytes
            if block is not None:
                block.free()
            raise
        with self._lock:
            new.host = block
            self.promoted += 1
            self.promoted_bytes += new.nbytes
        return True

    # -- from host memory to files

    def _stays(self, kept: _Kept) -> bool:
        return kept.busy or self.in_use(kept.name)

    def _make_room(self, new: str, nbytes: int) -> bool:
        """Whether there is room now. Memory that is being copied to the GPU stays, even if room is lacking then."""
        for kept in self._kept.values():
            if self.held_bytes + nbytes <= self.budget_bytes:
                break
            if kept.host is not None and not self._stays(kept):
                if kept.file is None:
                    self._write(kept, kept.host.host[: kept.nbytes], new)
                self._release(kept)
                self.displaced += 1
        return self.held_bytes + nbytes <= self.budget_bytes

    def _release(self, kept: _Kept, but: Any = None) -> None:
        """Takes the weights out of host memory. The block `but` is not freed: other weights will be in it."""
        if kept.host is not None:
            if kept.host is not but:
                kept.host.free()
            kept.host = None
            self.held_bytes -= kept.nbytes

    def _map(self, kept: _Kept) -> Bytes:
        assert kept.file is not None
        mapped = map_weights(kept.file).get("weights")
        if mapped is None or mapped.nbytes != kept.nbytes:
            raise WeightFileError(
                f"{kept.file} no longer holds the weights of {kept.name!r}: unload the model and load it again",
                path=kept.file, model=kept.name,
            )  # fmt: skip
        return mapped

    def _write(self, kept: _Kept, array: Bytes, new: str | None = None) -> None:
        """Writes weights to a new file; `new`: the model for which they make room."""
        what = f"the weights of model {kept.name!r}"
        if new is not None:
            what = f"to make room for model {new!r}, {what}"
        path = self._path(kept, what, new)
        try:
            write_weights(path, {"weights": array})
        except WeightFileError as e:
            facts = {**e.__dict__, "model": kept.name, "for_model": new}
            raise WeightFileError(f"{what} must go to the disk: {e}", **facts) from e
        with self._lock:
            kept.file = path
            self.file_bytes += kept.nbytes

    def _path(self, kept: _Kept, what: str, new: str | None) -> Path:
        """A name for a new file, where the disk has room for it."""
        with self._lock:
            try:
                if self.folder is None:
                    self.folder, self._own = Path(tempfile.mkdtemp(prefix="paellapy-weights-")), True
                free = shutil.disk_usage(self.folder).free
            except OSError as e:
                raise WeightFileError(
                    f"{what} must go to the disk, but {e.filename or 'the folder for temporary files'} cannot be used "
                    f"({e.strerror}): set TMPDIR to a folder that can be written to, or raise host_bytes",
                    path=e.filename, model=kept.name, for_model=new,
                ) from e  # fmt: skip
            if free < kept.nbytes:
                raise MemoryPlanError(
                    f"{what} ({readable_bytes(kept.nbytes)}) must go to disk, because "
                    f"{readable_bytes(self.held_bytes)} of host_bytes={readable_bytes(self.budget_bytes)} are in use; "
                    f"but {self.folder} has only {readable_bytes(free)} free: raise host_bytes or free disk space",
                    path=self.folder, model=kept.name, for_model=new, needed_bytes=kept.nbytes, free_bytes=free,
                    limit_bytes=self.budget_bytes,
                )  # fmt: skip
            self._written += 1
            return self.folder / f"{self._written}-{abs(hash(kept.name))}.safetensors"
