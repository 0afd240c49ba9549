"""Weights in safetensors files, which are written once and mapped into memory for reading.

    8 bytes: length of the header | header: JSON with each tensor's type, shape and place | the tensors, without gaps
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import MemoryPlanError
from paellapy.scheduler.models.memory import Bump, readable_bytes
from paellapy.scheduler.models.program import Node

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES = {name: short for short, name in _TYPES.items()}
_LONGEST_HEADER = 100 << 20  # the limit of the format's own library


class WeightFileError(PaellaError, ValueError):
    """A weight file is missing, truncated, or in another format."""


def write_weights(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes the whole file or none: a process that dies leaves no partial file under this name."""
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise WeightFileError(
                f"{name!r} is {array.dtype.name}, which safetensors files cannot hold: convert it to another type"
            )
        end = at + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    half = path.with_suffix(".part")
    try:
        with half.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
        os.replace(half, path)
    except OSError as e:
        half.unlink(missing_ok=True)
        raise WeightFileError(
            f"{at:,} bytes of weights cannot be written to {path} ({e.strerror}): free disk space, or keep more "
            "weights in host memory (host_bytes)"
        ) from e


def map_weights(path: str | Path, private: bool = False) -> dict[str, NDArray[Any]]:
    """The tensors of a file by name, in its order: read-only, and read from the disk when they are accessed. `private`:
    they can be written to, which does not change the file.

    The file's length is compared with its header now, because reading a part that is truncated later would end the
    process; `check_mapped` looks again.
    """
    path = Path(path)
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or not 2 <= length <= min(_LONGEST_HEADER, nbytes - 8):
                raise WeightFileError(
                    f"{path} is not a safetensors file, or is truncated: its header is longer than the file"
                )
            header = json.loads(file.read(length))
    except OSError as e:
        raise WeightFileError(
            f"the weights in {path} cannot be read ({e.strerror}): check that the file exists and is readable"
        ) from e
    except ValueError as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: its header is not JSON") from e
    if not isinstance(header, dict):
        raise WeightFileError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    try:
        places = sorted(((*about["data_offsets"], name) for name, about in header.items()))
        end = max((place[1] for place in places), default=0)
        if begin + end != nbytes:
            raise WeightFileError(
                f"{path} has {nbytes:,} bytes, but its header says {begin + end:,}: the file is truncated or damaged"
            )
        flat = np.memmap(path, np.uint8, "c" if private else "r", begin, (end,)) if end else np.empty(0, np.uint8)
        return {name: _tensor(flat[first:last], header[name]) for first, last, name in places}
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: {e}") from e


def check_mapped(arrays: Iterable[NDArray[Any]]) -> None:
    """Raises WeightFileError if a file that is mapped became shorter: reading the rest would end the process."""
    found: dict[int, mmap.mmap] = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            found[id(base)] = base
    for each in found.values():
        if each.size() < len(each):
            raise WeightFileError(
                f"the file of the weights was truncated to {each.size():,} bytes after the model was created: write "
                "the file again, in place of the old one, and create the model again"
            )


def _tensor(raw: NDArray[np.uint8], about: Mapping[str, Any]) -> NDArray[Any]:
    name = _TYPES[about["dtype"]]
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if raw.ctypes.data % dtype.itemsize:  # the format does not align tensors; NumPy then needs a copy
        raw = raw.copy()
    return raw.view(dtype).reshape(about["shape"])


# Address ranges for a model's weights, which stay the same while the memory behind them is mapped and unmapped.
#
# Programs are captured with these addresses. The weights lie in one range, in the model's order, which is about the
# order in which programs use them; a tensor that is used twice lies there once.


Bytes = NDArray[np.uint8]
# Size of a piece that is copied at a time. A copy engine takes one copy after the other: behind a piece of this size,
# inputs of a request wait for 160 µs. In pieces of 4 MiB an H200's link had 4 % less bandwidth than in pieces of 16 MiB
# (side experiment), behind which inputs would wait twice as long.
COPY_BYTES = 8 << 20


class Layout:
    """The offsets of some tensors and their total length.

    >>> layout = Layout([100, 300])
    >>> layout.offsets, layout.nbytes, layout.end_of(260)
    ([0, 256], 768, 768)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        bump = Bump()
        self.offsets = [bump.take(n) for n in sizes]
        self.nbytes = bump.used

    def end_of(self, offset: int) -> int:
        """The end of the tensor that contains this offset."""
        k = bisect_right(self.offsets, offset)
        return self.offsets[k] if k < len(self.offsets) else self.nbytes


class WeightRange(ABC):
    """The range of one model. It has memory from its creation until `evict`, and again from `bring` on."""

    address: int
    chunk_bytes: int
    held_bytes: int  # GPU memory used while it is mapped
    words: NDArray[np.uint64]  # one per chunk, set when the chunk has arrived

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.there = True

    @property
    def chunks(self) -> int:
        return -(-self.held_bytes // self.chunk_bytes)

    @abstractmethod
    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A device array over part of the range."""

    @abstractmethod
    def bring(self, source: Bytes) -> None:
        """Maps memory and starts copying the weights into it, chunk after chunk. Returns before the copies are done;
        `source` must not change until then.
        """

    @abstractmethod
    def evict(self) -> None:
        """Unmaps the memory. No running work may use it."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until all started copies are done."""

    @abstractmethod
    def write(self, source: Bytes, first: int, end: int) -> None:
        """Copies part of the weights, and waits for the copy."""

    @abstractmethod
    def fill(self, byte: int) -> None:
        """Overwrites the whole range with this byte."""

    @abstractmethod
    def holds(self, source: Bytes) -> bool:
        """Whether the range holds the same bytes as `source`."""

    @abstractmethod
    def free(self) -> None:
        """Gives up the address range for good."""

    def end_at(self, address: int) -> int:
        """How many bytes, from the start, a kernel with this address needs; 0 if it is outside the range."""
        offset = address - self.address
        return self.layout.end_of(offset) if 0 <= offset < self.layout.nbytes else 0


def needs_of(ends: Sequence[int], bounds: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes that each segment and all segments before it need, from the needs of each node.

    >>> needs_of([0, 512, 256, 1024], [(0, 2), (2, 3), (3, 4)])
    [512, 512, 1024]
    """
    found, most = [], 0
    for first, end in bounds:
        most = max(most, *ends[first:end])
        found.append(most)
    return found


def in_order(least: Sequence[int], most: Sequence[int]) -> list[int]:
    """The needs of the largest number of nodes whose needs do not fall, each the least or the most of its node; 0 for
    other nodes. Where weights lie in their order of use, a need that breaks the order comes from a stale pointer.

    >>> in_order([512, 0, 256, 1024, 256], [768, 0, 256, 1024, 1280])
    [0, 0, 256, 1024, 1280]
    """
    ends: list[int] = []  # entry k: the smallest need with which a chain of k + 1 nodes can end
    links: list[tuple[int, int, Any]] = []  # the last node of that chain, its need, and the link before
    for node, pair in enumerate(zip(least, most, strict=True)):
        for end in sorted({*pair} - {0}, reverse=True):  # the larger first, so that no chain has both
            k = bisect_right(ends, end)
            ends[k : k + 1] = [end]
            links[k : k + 1] = [(node, end, links[k - 1] if k else None)]
    found, link = [0] * len(least), links[-1] if links else None
    while link is not None:
        node, end, link = link
        found[node] = end
    return found


# Programs of two batch sizes compared: where they take the same steps, both need the same weights.


Bounds = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Steps:
    """Kernels and copies in order, each with its name and the weights that its arguments point to, lower and upper
    bound. The slices of a kernel are one step.
    """

    kinds: tuple[tuple[str, str, int, int], ...]
    of_node: tuple[int, ...]  # the step of each node


def steps_of(nodes: Sequence[Node], ends: Sequence[tuple[int, int]]) -> Steps:
    """`ends`: the leading bytes of the weights that each node needs, by its arguments."""
    kinds: list[tuple[str, str, int, int]] = []
    of_node: list[int] = []
    before = -1
    for node, (least, most) in zip(nodes, ends, strict=True):
        if node.launch < 0 or node.launch != before:
            kinds.append((node.kind, node.name, least, most))
        of_node.append(len(kinds) - 1)
        before = node.launch
    return Steps(tuple(kinds), tuple(of_node))


def needs_like(new: Steps, bounds: Bounds, tried: Steps, tried_bounds: Bounds, tried_needs: Sequence[int]) -> list[int]:
    """The needs of a program's segments, from the needs with which a program of the same steps was tried out; empty if
    the steps differ, since other kernels may hide other pointers.

    >>> steps = Steps((("kernel", "gemm", 256, 256), ("kernel", "gemm", 512, 512)), (0, 1))
    >>> needs_like(steps, [(0, 2)], steps, [(0, 1), (1, 2)], [256, 512])
    [512]
    """
    if new.kinds != tried.kinds:
        return []
    need = [0] * len(tried.kinds)
    for (first, end), nbytes in zip(tried_bounds, tried_needs, strict=True):
        for step in tried.of_node[first:end]:
            need[step] = max(need[step], nbytes)
    return needs_of([need[step] for step in new.of_node], bounds)


# Weights that are not on the GPU: in host memory up to a budget, and in files beyond it.
#
# New weights displace the weights that were brought to the GPU least recently. Weights in a file take the place of less
# valuable weights when they are in demand (`promote`). A model's file is written once, because weights do not change.


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
                raise MemoryPlanError(f"the weights of {name!r} are in the host store already; unload the model first")
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
                self._write(kept, array, f"the weights of model {name!r}")
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
                why = f"to make room for model {new.name!r}, the weights of model {each.name!r}"
                self._write(each, each.host.host[: each.nbytes], why)
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
        for name, kept in self._kept.items():
            if self.held_bytes + nbytes <= self.budget_bytes:
                break
            if kept.host is not None and not self._stays(kept):
                if kept.file is None:
                    why = f"to make room for model {new!r}, the weights of model {name!r}"
                    self._write(kept, kept.host.host[: kept.nbytes], why)
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
                f"{kept.file} no longer holds the weights of {kept.name!r}: unload the model and load it again"
            )
        return mapped

    def _write(self, kept: _Kept, array: Bytes, what: str) -> None:
        """`what` says in an error whose weights go to the disk, and for whom."""
        path = self._path(kept, what)
        try:
            write_weights(path, {"weights": array})
        except WeightFileError as e:
            raise WeightFileError(f"{what} must go to the disk: {e}") from e
        with self._lock:
            kept.file = path
            self.file_bytes += kept.nbytes

    def _path(self, kept: _Kept, what: str) -> Path:
        """A name for a new file, where the disk has room for it."""
        with self._lock:
            try:
                if self.folder is None:
                    self.folder, self._own = Path(tempfile.mkdtemp(prefix="paellapy-weights-")), True
                free = shutil.disk_usage(self.folder).free
            except OSError as e:
                raise WeightFileError(
                    f"{what} must go to the disk, but {e.filename or 'the folder for temporary files'} cannot be used "
                    f"({e.strerror}): set TMPDIR to a folder that can be written to, or raise host_bytes"
                ) from e
            if free < kept.nbytes:
                raise MemoryPlanError(
                    f"{what} ({readable_bytes(kept.nbytes)}) must go to disk, because "
                    f"{readable_bytes(self.held_bytes)} of host_bytes={readable_bytes(self.budget_bytes)} are in use; "
                    f"but {self.folder} has only {readable_bytes(free)} free: raise host_bytes or free disk space"
                )
            self._written += 1
            return self.folder / f"{self._written}-{abs(hash(kept.name))}.safetensors"
