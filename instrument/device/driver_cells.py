"""Launches of any library in this process wait at a gate: their pointers to the driver's functions lead through it.

Nobody links to the driver's launches directly: the runtime, Triton, CuPy and others ask for their addresses and keep
them in their data. Those cells are found by what they hold, and get the address of a function that waits first and then
calls the driver. No compiler is needed beyond Numba's, and an open gate costs some nanoseconds a launch, where CUPTI's
callbacks cost microseconds.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from paellapy.instrument.device import gate
from paellapy.instrument.device.jit import compiled

Words = NDArray[np.uint64]
Ints = NDArray[np.int64]

LAUNCHES = (
    "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuMemcpyAsync",
    "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync",
    "cuMemcpyPeerAsync", "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async",
)  # fmt: skip
_VERSIONS = (11000, 11030, 11060, 12000, 12030, 12060, 12080, 13000)  # each may have functions of its own
_SLEEP_US = 20  # between two looks at a closed gate
_ARGUMENTS = 12  # integers and pointers that are handed on, whatever the function takes: the most is eleven
_MOST = 1 << 16  # words of one region that look like addresses in the library
_READ, _WRITE, _PAGE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PAGESIZE
_LOAD, _RELRO = 1, 0x6474E552  # kinds of program headers

_I64, _I32 = ir.IntType(64), ir.IntType(32)


@intrinsic  # type: ignore[untyped-decorator]
def _load(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _add(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _now_ns(typing: Any, function: Any) -> Any:
    """CLOCK_MONOTONIC, by the address of clock_gettime: into the caller's stack, since any thread may launch."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, spec.type])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [ir.Constant(_I32, 1), spec])
        both = builder.load(spec)
        seconds = builder.mul(builder.extract_value(both, 0), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(both, 1))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _sleep(typing: Any, function: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I32])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [ir.Constant(_I32, _SLEEP_US)])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, function: Any, given: Any) -> Any:
    """The driver's function with all that our caller may have passed: what is too much, nobody looks at."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * _ARGUMENTS)
        passed = [builder.extract_value(args[1], k) for k in range(_ARGUMENTS)]
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), passed)

    return types.uint64(types.uint64, given), generate


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def gated(original: int, cell: int) -> Any:
    """A C function that waits at the gate whose words are where `cell` points, and then calls the original."""
    libc: Any = ctypes.CDLL(None)
    clock, sleep = np.uint64(_address(libc.clock_gettime)), np.uint64(_address(libc.usleep))
    function, where = np.uint64(original), np.uint64(cell)
    word = np.uint64(8)
    alive, share_at = word * np.uint64(gate.ALIVE_UNTIL_NS), word * np.uint64(gate.SHARE)
    launches, waits = word * np.uint64(gate.LAUNCHES), word * np.uint64(gate.WAITS)
    waited = word * np.uint64(gate.WAITED_NS)
    unit, period, zero, one = np.uint64(gate.SHARE_UNIT), np.uint64(gate.PERIOD_NS), np.uint64(0), np.uint64(1)

    def pass_and_call(a, b, c, d, e, f, g, h, i, j, k, m):  # type: ignore[no-untyped-def]
        words = _load(where)
        _add(words + launches, one)
        if _load(words) != zero or _load(words + share_at) < unit:
            began = now = _now_ns(clock)
            while True:
                share = _load(words + share_at)
                shut = now < _load(words)
                if not shut and share < unit and now < _load(words + alive):
                    shut = now % period * unit >= share * period
                if not shut:
                    break
                _sleep(sleep)
                now = _now_ns(clock)
                words = _load(where)  # the engine may have left meanwhile
            if now != began:
                _add(words + waits, one)
                _add(words + waited, now - began)
        return _call(function, (a, b, c, d, e, f, g, h, i, j, k, m))

    return cfunc(types.uint64(*[types.uint64] * _ARGUMENTS), nopython=True)(pass_and_call)


@compiled
def _find(words: Words, low: np.uint64, size: np.uint64, found: Ints) -> int:
    """Where words are from `low` on and below it plus the size; how many. Hundreds of megabytes are looked at."""
    n = 0
    for k in range(words.shape[0]):
        if words[k] - low < size and n < found.shape[0]:
            found[n] = k
            n += 1
    return n


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
    """Data of all loaded objects but one, as their program headers say: what can be written, and what is protected once
    its addresses have been filled in.
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

    libc: Any = ctypes.CDLL(None)
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.c_size_t)
    libc.dl_iterate_phdr(call(note), None)
    return found


def text_of(library: str) -> tuple[int, int]:
    """From where to where a library is loaded; (0, 0): it is not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if library in line]
    return (int(found[0][0], 16), int(found[-1][1], 16)) if found else (0, 0)


class Cells:
    """The gate of this process, put before functions of a library wherever their addresses are kept."""

    def __init__(self, cell: int, library: str = "libcuda.so", names: Iterable[str] = LAUNCHES) -> None:
        self._cell, self._library, self._names = cell, library, tuple(names)
        self._wrappers: dict[int, Any] = {}
        self._ours: dict[int, int] = {}  # the original's address → ours
        self.patched = 0

    def look(self) -> int:
        """Finds and changes cells that are new; how many."""
        low, high = text_of(self._library)
        if not low:
            return 0
        if not self._ours:
            for address in self._addresses():
                self._wrappers[address] = gated(address, self._cell)
                self._ours[address] = self._wrappers[address].address
        found = sum(self._change(region, low, high) for region in regions(self._library))
        self.patched += found
        return found

    def _addresses(self) -> set[int]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[5].strip() for line in lines if self._library in line)
        library: Any = ctypes.CDLL(path)
        found = set()
        ask: Any = getattr(library, "cuGetProcAddress_v2", None)
        for name in self._names:
            for symbol in (name, f"{name}_v2", f"{name}_ptsz", f"{name}_v2_ptsz"):
                if hasattr(library, symbol):
                    found.add(_address(getattr(library, symbol)))
            for version in _VERSIONS if ask is not None else ():
                for flags in (1, 2):  # the legacy default stream, and one per thread
                    pointer, status = ctypes.c_void_p(), ctypes.c_int()
                    code = ask(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags),
                               ctypes.byref(status))  # fmt: skip
                    if code == 0 and pointer.value:
                        found.add(pointer.value)
        return found - {0}

    def _change(self, region: Region, low: int, high: int) -> int:
        memory: Any = (ctypes.c_uint64 * ((region.end - region.start) // 8)).from_address(region.start)
        words = np.frombuffer(memory, np.uint64)
        found = np.zeros(_MOST, np.int64)
        candidates = found[: _find(words, np.uint64(low), np.uint64(high - low), found)].tolist()
        cells = [(k, self._ours[int(words[k])]) for k in candidates if int(words[k]) in self._ours]
        if not cells:
            return 0
        libc: Any = ctypes.CDLL(None)
        if not region.writable:
            self._protect(libc, region, _READ | _WRITE)
        for k, ours in cells:
            ctypes.c_uint64.from_address(region.start + 8 * k).value = ours
        if not region.writable:
            self._protect(libc, region, _READ)
        return len(cells)

    @staticmethod
    def _protect(libc: Any, region: Region, how: int) -> None:
        start = region.start & -_PAGE
        if libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(region.end - start), how) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
