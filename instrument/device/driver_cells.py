"""Makes launches of any library in this process wait at a gate: redirects pointers to the driver's functions.

No library links to the driver's launch functions directly: the runtime, Triton, CuPy and others ask for their addresses
and keep them in their data. These cells are found by their contents, and get the address of a function that waits first
and then calls the driver (`gate_code`). The other way without a compiler is a callback of CUPTI's;
benchmarks/gate_cost.py measures what both add to a launch.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.instrument.device.gate import keep_forever
from paellapy.instrument.device.gate_code import address, gated
from paellapy.instrument.device.memory_search import Finder, in_pieces

LAUNCHES = (
    "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuMemcpy", "cuMemcpyHtoD",
    "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyPeer", "cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy3D", "cuMemcpyAsync",
    "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync",
    "cuMemcpyPeerAsync", "cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync", "cuMemsetD8", "cuMemsetD16", "cuMemsetD32",
    "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async", "cuMemsetD2D8Async", "cuMemsetD2D16Async",
    "cuMemsetD2D32Async",
)  # fmt: skip
# Each version may have its own functions. The runtime asks for most functions in their first version: 3020, 4000, or
# 7000 with a stream per thread.
_VERSIONS = (
    3020, 4000, 7000, 9000, 10000, 11000, 11030, 11060, 12000, 12030, 12060, 12080, 13000, 13010, 13020,
)  # fmt: skip
_READ, _WRITE, _PAGE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PAGESIZE
_LOAD, _RELRO = 1, 0x6474E552  # kinds of program headers


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a loaded object's data."""

    start: int
    end: int
    writable: bool


class _Segment(ctypes.Structure):
    """A program header of an object (Elf64_Phdr)."""

    _fields_ = [("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("offset", "address", "physical", "file_bytes", "bytes", "align")
    ]


class _Object(ctypes.Structure):
    """A loaded object (struct dl_phdr_info)."""

    _fields_ = [
        ("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    ]  # fmt: skip


def regions(skipped: str) -> list[Region]:
    """The data of all loaded objects but one, from their program headers: writable data, and data that are protected
    once their addresses have been filled in.
    """
    found: list[Region] = []

    def note(given: Any, _: int, __: int) -> int:
        each = given.contents
        if skipped in (each.name or b"").decode(errors="replace"):
            return 0
        parts = [each.segments[k] for k in range(each.count)]
        protected = [
            ((each.base + p.address) & -_PAGE, (each.base + p.address + p.bytes) & -_PAGE)
            for p in parts
            if p.kind == _RELRO
        ]
        for p in parts:
            if p.kind == _LOAD and p.flags & 2:
                start, end = -(-(each.base + p.address) // 8) * 8, each.base + p.address + p.bytes
                for low, high in protected:
                    if low <= start < high <= end:
                        found.append(Region(start, high, False))
                        start = high
                found.append(Region(start, end, True))
        return 0

    # The interpreter's lock is kept: a thread that loads a library holds it and waits for the loader's lock, which is
    # held while `note` is called.
    libc: Any = ctypes.PyDLL(None)
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.c_size_t)
    libc.dl_iterate_phdr(call(note), None)
    return found


def loaded_objects() -> list[str]:
    """The lines of /proc/self/maps that name a library."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line]


def text_of(library: str, objects: list[str]) -> tuple[int, int]:
    """The address range at which a library is loaded; (0, 0) if it is not."""
    found = [line.split()[0].split("-") for line in objects if library in line]
    return (int(found[0][0], 16), int(found[-1][1], 16)) if found else (0, 0)


class Cells:
    """The gate of this process, placed before functions of a library wherever their addresses are kept."""

    def __init__(self, cell: int, library: str = "libcuda.so", names: Iterable[str] = LAUNCHES) -> None:
        self._cell, self._library, self._names = cell, library, tuple(names)
        self._ours: dict[int, int] = {}  # the original's address → ours
        self._seen: list[str] = []  # objects and their addresses, when their data were listed
        self._data: list[Region] = []
        self._bounds = np.zeros((0, 2), np.uint64)
        self._finder: Finder | None = None
        self.patched = 0

    def look(self) -> int:
        """Finds and changes new cells; returns their number."""
        objects = loaded_objects()
        low, high = text_of(self._library, objects)
        if not low:
            return 0
        if not self._ours:
            self._ours, code = gated(self._addresses(), self._cell, self._streams())
            keep_forever(code)
            objects = loaded_objects()
        if self._finder is None:
            self._finder = Finder()
            objects = loaded_objects()
        if objects != self._seen:
            # Listing takes longer than searching, and blocks all other threads of the interpreter.
            self._data = regions(self._library)
            self._bounds = in_pieces([(each.start, each.end) for each in self._data])
            self._seen = objects
        found = sum(self._change(at) for at in self._finder.find(self._bounds, low, high))
        self.patched += found
        return found

    def _loaded(self) -> Any:
        return ctypes.CDLL(next(line.split(maxsplit=5)[5].strip() for line in self._lines()))

    def _lines(self) -> list[str]:
        return [line for line in loaded_objects() if self._library in line]

    def _streams(self) -> tuple[int, int] | None:
        library, names = self._loaded(), ("cuStreamIsCapturing", "cuStreamQuery")
        if not all(hasattr(library, name) for name in names):
            return None
        return address(getattr(library, names[0])), address(getattr(library, names[1]))

    def _addresses(self) -> dict[int, str]:
        library: Any = self._loaded()
        found: dict[int, str] = {}
        ask: Any = getattr(library, "cuGetProcAddress_v2", None)
        for name in self._names:
            for symbol in (name, f"{name}_v2", f"{name}_ptsz", f"{name}_v2_ptsz"):
                if hasattr(library, symbol):
                    found[address(getattr(library, symbol))] = name
            for version in _VERSIONS if ask is not None else ():
                for flags in (0, 1, 2):  # default, legacy default stream, and one stream per thread
                    pointer, status = ctypes.c_void_p(), ctypes.c_int()
                    code = ask(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags),
                               ctypes.byref(status))  # fmt: skip
                    if code == 0 and pointer.value:
                        found[pointer.value] = name
        found.pop(0, None)
        return found

    def _change(self, at: int) -> bool:
        """Redirects a cell through the gate, if it holds the address of one of the functions."""
        cell = ctypes.c_uint64.from_address(at)
        ours = self._ours.get(cell.value)
        if ours is None:
            return False
        region = next(each for each in self._data if each.start <= at < each.end)
        libc: Any = ctypes.CDLL(None)
        if not region.writable:
            self._protect(libc, region, _READ | _WRITE)
        cell.value = ours
        if not region.writable:
            self._protect(libc, region, _READ)
        return True

    @staticmethod
    def _protect(libc: Any, region: Region, how: int) -> None:
        start = region.start & -_PAGE
        if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(region.end - start), how) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
