"""Weights: safetensors files, address ranges on a GPU, and the bytes that the segments of a program need.

A safetensors file is written once and mapped into memory for reading:

    8 bytes: length of the header | header: JSON with each tensor's type, shape and place | the tensors, without gaps
"""

from __future__ import annotations

import json
import mmap
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.models.memory import Bump
from paellapy.scheduler.models.program import Node

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES = {name: short for short, name in _TYPES.items()}
Bytes = NDArray[np.uint8]
Bounds = Sequence[tuple[int, int]]  # segments as (first node, past the last)
# Size of a piece that is copied at a time. A copy engine takes one copy after the other: behind a piece of this size,
# inputs of a request wait for 160 µs. In pieces of 4 MiB an H200's link had 4 % less bandwidth than in pieces of 16 MiB
# (side experiment), behind which inputs would wait twice as long.
COPY_BYTES = 8 << 20
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
                f"{name!r} is {array.dtype.name}, which safetensors files cannot hold: convert it to another type",
                tensor=name, given=array.dtype.name,
            )  # fmt: skip
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
            "weights in host memory (host_bytes)", path=path, needed_bytes=at
        ) from e  # fmt: skip


def map_weights(path: str | Path, private: bool = False) -> dict[str, NDArray[Any]]:
    """The tensors of a file by name, in its order: read-only, and read from the disk when they are accessed. `private`:
    they can be written to, which does not change the file.

    The file's length is compared with its header now, because reading a part that is truncated later would end the
    process; `check_mapped` looks again.
    """
    path = Path(path)

    def wrong(why: str, **facts: Any) -> WeightFileError:
        text = f"{path} is not a safetensors file, or is truncated or damaged: {why}"
        return WeightFileError(text, path=path, **facts)

    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or not 2 <= length <= min(_LONGEST_HEADER, nbytes - 8):
                raise wrong("its header is longer than the file", given=nbytes)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        places = sorted(((*about["data_offsets"], name) for name, about in header.items()))
        end = max((place[1] for place in places), default=0)
        if begin + end != nbytes:
            says = begin + end
            raise wrong(f"it has {nbytes:,} bytes, but its header says {says:,}", given=nbytes, limit=says)
        flat = np.memmap(path, np.uint8, "c" if private else "r", begin, (end,)) if end else np.empty(0, np.uint8)
        return {name: _tensor(flat[first:last], header[name]) for first, last, name in places}
    except WeightFileError:
        raise
    except OSError as e:
        raise WeightFileError(
            f"the weights in {path} cannot be read ({e.strerror}): check that the file exists and is readable",
            path=path,
        ) from e
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise wrong(f"its header cannot be used ({type(e).__name__}: {e})") from e


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
                "the file again, in place of the old one, and create the model again", given=each.size(),
                limit=len(each),
            )  # fmt: skip


def _tensor(raw: NDArray[np.uint8], about: Mapping[str, Any]) -> NDArray[Any]:
    name = _TYPES[about["dtype"]]
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if raw.ctypes.data % dtype.itemsize:  # the format does not align tensors; NumPy then needs a copy
        raw = raw.copy()
    return raw.view(dtype).reshape(about["shape"])


# -- address ranges


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
    """Addresses for a model's weights, which stay the same while the memory behind them is mapped and unmapped.

    Programs are captured with these addresses. The weights lie in the model's order, which is about the order in which
    programs use them; a tensor that is used twice lies there once. The range has memory from its creation until
    `evict`, and again from `bring` on.
    """

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


# -- the bytes that segments need


def needs_of(ends: Sequence[int], bounds: Bounds) -> list[int]:
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
    """The needs of a program's segments, from those that trial runs found for another batch size of the same steps;
    empty if the steps differ, since other kernels may hide other pointers.

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
