"""Preemption on a real GPU: flags in device memory, written past all streams, and lists of the blocks that did not run.

A flag in host memory would cost every block a round trip over PCIe. In device memory it costs one to L2, and the host
writes all its copies with one stream operation, on a stream of the highest priority that nothing else uses.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Blocks, Flag, Run, Work
from paellapy.instrument.device.driver import (
    MOST_URGENT,
    CudaArray,
    CudaEvent,
    CudaStream,
    Gpu,
    check,
    driver,
    fail,
    library,
)
from paellapy.instrument.records import FLAG_COPIES, FLAG_COPY_BYTES, LEFT_HEAD_BYTES

_FLAG_BYTES = FLAG_COPIES * FLAG_COPY_BYTES
_FLAGS = 256  # flags per allocation
_LEAST_BLOCKS = 256  # smallest size of a list
# An operation that writes a word: the driver's CUstreamBatchMemOpParams. The bindings would convert and copy all
# operations of a flag at every call, one by one in Python.
_WRITE = np.dtype(
    {
        "names": ["operation", "address", "value", "flags"],
        "formats": ["<u4", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 16, 24],
        "itemsize": 48,
    }
)
_WRITE_32 = 2  # CU_STREAM_MEM_OP_WRITE_VALUE_32


@dataclass(eq=False, slots=True)
class _Word:
    """A flag's place in memory. The next flag in this place continues its numbers, so it preempts no earlier launch."""

    address: int
    epoch: int = 0
    ends: dict[int, CudaEvent] = field(default_factory=dict)  # end of the latest launch under it on each stream

    def idle(self) -> bool:
        return all(end.done() for end in self.ends.values())


@functools.cache
def _batch() -> Any:
    """The driver's function for several operations on a stream. Drivers before 11.7 do not have it."""
    found = library().cuStreamBatchMemOp_v2
    found.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    found.restype = ctypes.c_int
    return found


class Preemption:
    """The flags of one GPU, the stream that writes them, and memory for block numbers."""

    def __init__(self, device: Gpu) -> None:
        self.device = device
        self._stream = CudaStream(device, MOST_URGENT)
        self._lock = threading.RLock()
        self._slabs: list[CudaArray] = []
        self._flags: list[_Word] = []  # places that no flag uses
        self._lists: dict[int, list[CudaArray]] = {}  # free lists, by their size in bytes

    def flag(self) -> CudaFlag:
        with self._lock:
            free = next((word for word in self._flags if word.idle()), None)
            if free is None:
                self._slabs.append(self.device.cleared(_FLAGS * _FLAG_BYTES))
                self._flags += [_Word(self._slabs[-1].ptr + k * _FLAG_BYTES) for k in range(_FLAGS)]
                free = self._flags[-1]
            self._flags.remove(free)
            return CudaFlag(self, free)

    def give_back(self, word: _Word) -> None:
        """Takes back the place of a flag that no longer exists."""
        self._flags.append(word)

    def write(self, operations: NDArray[np.void], word: int) -> None:
        """Writes a word to all copies of a flag."""
        self.device.activate()
        with self._lock:  # the operations belong to the flag, which another thread may set too
            operations["value"] = word
            stream, at = self._stream.handle, operations.ctypes.data
            status = _batch()(stream, len(operations), at, 0)
        if status:
            fail(status, "setting a flag")

    def read(self, address: int, words: int) -> NDArray[np.uint32]:
        """Words of device memory, read without waiting for other streams."""
        target = np.empty(words, np.uint32)
        if not words:
            return target
        cu = driver()
        self.device.activate()
        with self._lock:
            stream = self._stream.handle
            check(cu.cuMemcpyDtoHAsync(target.ctypes.data, address, target.nbytes, stream), "reading left blocks")
            check(cu.cuStreamSynchronize(stream), "reading left blocks")
        return target

    def new_list(self, blocks: int, stream: int) -> CudaArray:
        """A list with a counter, set to 0 in the order of the stream, and room for at least this many block numbers."""
        nbytes = LEFT_HEAD_BYTES + 4 * (1 << (max(blocks, _LEAST_BLOCKS) - 1).bit_length())
        with self._lock:
            free = self._lists.setdefault(nbytes, [])
            used = free.pop() if free else None
        if used is None:
            return self.device.cleared(nbytes)
        check(driver().cuMemsetD8Async(used.ptr, 0, 4, stream), "clearing a counter")
        return used

    def keep_list(self, made: CudaArray) -> None:
        """Takes back a list that no launch uses any more."""
        self._lists[made.nbytes].append(made)


class CudaFlag(Flag):
    def __init__(self, preemption: Preemption, word: _Word) -> None:
        super().__init__()
        self.preemption, self._place, self._epoch = preemption, word, word.epoch
        self._operations = np.zeros(FLAG_COPIES, _WRITE)
        self._operations["operation"] = _WRITE_32
        self._operations["address"] = word.address + np.arange(FLAG_COPIES, dtype=np.uint64) * FLAG_COPY_BYTES
        weakref.finalize(self, preemption.give_back, word)

    @property
    def address(self) -> int:
        return self._place.address

    def next_epoch(self) -> int:
        self._place.epoch = super().next_epoch()
        return self._place.epoch

    def launched(self, stream: int, end: CudaEvent) -> None:
        """Records that a launch reads this flag until `end`."""
        self._place.ends[stream] = end

    def _write(self, word: int) -> None:
        self.preemption.write(self._operations, word)


class CudaRun(Run):
    """A launch under a flag: its number, the list that its blocks write to, and the list that its blocks come from."""

    def __init__(self, flag: CudaFlag, work: Work, blocks: Blocks) -> None:
        self._flag, self._preemption = flag, flag.preemption
        self.epoch = flag.next_epoch()
        self._before: CudaRun | None = None  # the run whose remaining blocks these are
        if isinstance(blocks, tuple):
            self.part = blocks
        else:
            assert isinstance(blocks, CudaRun)
            self._before, self.part = blocks, (0, blocks.count_left())
        self.list = self._preemption.new_list(self.part[1], work.stream)
        self._count = -1
        self._numbers: NDArray[np.int64] | None = None
        self._stream = work.stream
        self._start = CudaEvent(work.stream)
        self._end: CudaEvent | None = None

    @property
    def words(self) -> tuple[int, int, int, int]:
        """The list of its blocks (or 0), the list for blocks that do not run, its flag, and this launch's number."""
        todo = self._before.list.ptr + LEFT_HEAD_BYTES if self._before is not None else 0
        return todo, self.list.ptr, self._flag.address, self.epoch

    def launched(self) -> None:
        """Called once the kernel is on its stream."""
        self._end = CudaEvent(self._stream)
        self._flag.launched(self._stream, self._end)

    def over(self) -> bool:
        return self._end is not None and self._end.done()

    def wait(self) -> None:
        assert self._end is not None
        self._end.synchronize()

    def count_left(self) -> int:
        if self._count < 0:
            caught = self._flag.has_caught(self.epoch)
            self._count = int(self._preemption.read(self.list.ptr, 1)[0]) if caught else 0
            if self._before is not None:  # its list is not read any more
                before, self._before = self._before, None
                before.release()
            if not self._count:
                self.release()
        return self._count

    def left(self) -> NDArray[np.int64]:
        if self._numbers is None:
            count = self.count_left()
            self._numbers = self._preemption.read(self.list.ptr + LEFT_HEAD_BYTES, count).astype(np.int64)
        return self._numbers

    def release(self) -> None:
        """Releases its list, which no launch uses any more."""
        self._preemption.keep_list(self.list)

    def elapsed_ns(self) -> float:
        assert self._end is not None
        return self._end.elapsed_ns(self._start)
