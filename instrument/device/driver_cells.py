"""Launches of any library in this process wait at a gate: their pointers to the driver's functions lead through it.

Nobody links to the driver's launches directly: the runtime, Triton, CuPy and others ask for their addresses and keep
them in their data. Those cells are found by what they hold, and get the address of a function that waits first and then
calls the driver. No compiler is needed beyond LLVM, which comes with Numba. An open gate adds 0.05 µs to a launch
(benchmarks/gate_cost.py); CUPTI's callbacks, the other way without a compiler, added 3.5 µs in a trial.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from paellapy.instrument.device import gate

LAUNCHES = (
    "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch", "cuMemcpyAsync",
    "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuMemcpy2DAsync", "cuMemcpy3DAsync",
    "cuMemcpyPeerAsync", "cuMemsetD8Async", "cuMemsetD16Async", "cuMemsetD32Async",
)  # fmt: skip
_VERSIONS = (11000, 11030, 11060, 12000, 12030, 12060, 12080, 13000, 13010, 13020)  # each may have functions of its own
_SLEEP_US = 20  # between two looks at a closed gate
_ARGUMENTS = 12  # integers and pointers that are handed on, whatever the function takes: the most is eleven
_READ, _WRITE, _PAGE = mmap.PROT_READ, mmap.PROT_WRITE, mmap.PAGESIZE
_LOAD, _RELRO = 1, 0x6474E552  # kinds of program headers

_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


class _Gate:
    """Machine code of a gate and of all functions behind it, put together at once: Numba would take seconds."""

    def __init__(self, cell: int) -> None:
        self.module, self._cell = ir.Module("paellapy_gate"), cell
        self._now, self._words, self._wait = (
            ir.Function(self.module, ir.FunctionType(_I64, [_I64] * n), name)
            for name, n in (("now_ns", 0), ("words", 0), ("wait", 1))
        )
        self.passes = ir.Function(self.module, ir.FunctionType(ir.VoidType(), []), "passes")
        libc: Any = ctypes.CDLL(None)
        self._make_now(_address(libc.clock_gettime))
        code = ir.IRBuilder(self._words.append_basic_block())
        code.ret(self._load(code, _number(cell)))
        self._make_wait(_address(libc.usleep))
        self._make_passes()

    @staticmethod
    def _at(code: Any, words: Any, which: int) -> Any:
        return code.add(words, _number(8 * which))

    @staticmethod
    def _load(code: Any, address: Any) -> Any:
        return code.load_atomic(code.inttoptr(address, _I64.as_pointer()), "acquire", 8)

    def _add(self, code: Any, words: Any, which: int, value: Any) -> None:
        code.atomic_rmw("add", code.inttoptr(self._at(code, words, which), _I64.as_pointer()), value, "monotonic")

    @staticmethod
    def _call(code: Any, address: int, kind: Any, given: list[Any]) -> Any:
        return code.call(code.inttoptr(_number(address), kind.as_pointer()), given)

    def _make_now(self, clock_gettime: int) -> None:
        """CLOCK_MONOTONIC into the caller's stack, since any thread may launch."""
        code = ir.IRBuilder(self._now.append_basic_block())
        spec = code.alloca(ir.ArrayType(_I64, 2))
        self._call(code, clock_gettime, ir.FunctionType(_I32, [_I32, spec.type]), [ir.Constant(_I32, 1), spec])
        both = code.load(spec)
        seconds = code.mul(code.extract_value(both, 0), _number(1_000_000_000))
        code.ret(code.add(seconds, code.extract_value(both, 1)))

    def _make_wait(self, usleep: int) -> None:
        """As `gate.closed_at` says, until it does not; the words may be others after each sleep."""
        names = ("begin", "look", "share", "alive", "period", "sleep", "end")
        blocks = [self._wait.append_basic_block(name) for name in names]
        begin, look, share_of, alive, period, sleep, end = (ir.IRBuilder(each) for each in blocks)
        began = begin.call(self._now, [])
        begin.branch(blocks[1])
        words, now = look.phi(_I64), look.phi(_I64)
        words.add_incoming(self._wait.args[0], blocks[0])
        now.add_incoming(began, blocks[0])
        look.cbranch(look.icmp_unsigned("<", now, self._load(look, words)), blocks[5], blocks[2])
        share = self._load(share_of, self._at(share_of, words, gate.SHARE))
        share_of.cbranch(share_of.icmp_unsigned("<", share, _number(gate.SHARE_UNIT)), blocks[3], blocks[6])
        until = self._load(alive, self._at(alive, words, gate.ALIVE_UNTIL_NS))
        alive.cbranch(alive.icmp_unsigned("<", now, until), blocks[4], blocks[6])
        part = period.mul(period.urem(now, _number(gate.PERIOD_NS)), _number(gate.SHARE_UNIT))
        over = period.icmp_unsigned(">=", part, period.mul(share, _number(gate.PERIOD_NS)))
        period.cbranch(over, blocks[5], blocks[6])
        self._call(sleep, usleep, ir.FunctionType(_I32, [_I32]), [ir.Constant(_I32, _SLEEP_US)])
        now.add_incoming(sleep.call(self._now, []), blocks[5])
        words.add_incoming(sleep.call(self._words, []), blocks[5])
        sleep.branch(blocks[1])
        with end.if_then(end.icmp_unsigned("!=", now, began)):
            self._add(end, words, gate.WAITS, _number(1))
            self._add(end, words, gate.WAITED_NS, end.sub(now, began))
        end.ret(now)

    def _make_passes(self) -> None:
        code = ir.IRBuilder(self.passes.append_basic_block())
        words = code.call(self._words, [])
        self._add(code, words, gate.LAUNCHES, _number(1))
        share = self._load(code, self._at(code, words, gate.SHARE))
        shut = code.icmp_unsigned("!=", self._load(code, words), _number(0))
        with code.if_then(code.or_(shut, code.icmp_unsigned("<", share, _number(gate.SHARE_UNIT))), likely=False):
            code.call(self._wait, [words])
        code.ret_void()

    def before(self, original: int) -> str:
        """Adds a function that waits and then calls the original with all that its caller may have passed: what is too
        much, nobody looks at. Its name.
        """
        kind = ir.FunctionType(_I64, [_I64] * _ARGUMENTS)
        made = ir.Function(self.module, kind, f"gated_{original:x}")
        code = ir.IRBuilder(made.append_basic_block())
        code.call(self.passes, [])
        code.ret(self._call(code, original, kind, list(made.args)))
        return str(made.name)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def gated(originals: Iterable[int], cell: int) -> tuple[dict[int, int], Any]:
    """C functions that wait at the gate whose words are where `cell` points, and then call the originals; by their
    addresses. The second result keeps them.
    """
    gate_code = _Gate(cell)
    names = {original: gate_code.before(original) for original in originals}
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(str(gate_code.module))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()
    return {original: int(engine.get_function_address(name)) for original, name in names.items()}, engine


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

    # The interpreter's lock is kept: somebody who loads a library holds it and waits for the loader's lock, which is
    # held while `note` is called.
    libc: Any = ctypes.PyDLL(None)
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
        self._keep: Any = None
        self._ours: dict[int, int] = {}  # the original's address → ours
        self.patched = 0

    def look(self) -> int:
        """Finds and changes cells that are new; how many."""
        low, high = text_of(self._library)
        if not low:
            return 0
        if not self._ours:
            self._ours, self._keep = gated(self._addresses(), self._cell)
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
                for flags in (0, 1, 2):  # as it is set, with the legacy default stream, and with one per thread
                    pointer, status = ctypes.c_void_p(), ctypes.c_int()
                    code = ask(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags),
                               ctypes.byref(status))  # fmt: skip
                    if code == 0 and pointer.value:
                        found.add(pointer.value)
        return found - {0}

    def _change(self, region: Region, low: int, high: int) -> int:
        memory: Any = (ctypes.c_uint64 * ((region.end - region.start) // 8)).from_address(region.start)
        words = np.frombuffer(memory, np.uint64)
        candidates = np.flatnonzero(words - np.uint64(low) < np.uint64(high - low)).tolist()
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
