"""Makes launches of any library in this process wait at a gate: redirects pointers to the driver's functions.

No library links to the driver's launch functions directly: the runtime, Triton, CuPy and others ask for their addresses
and keep them in their data. These cells are found by their contents, and get the address of a function that waits first
and then calls the driver (`gate_code`). The other way without a compiler is a callback of CUPTI's;
docs/results_notes.md has what both add to a launch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numpy.typing import NDArray

from paellapy.instrument.device.driver import NOT_READY

# --- gates: launches of this process wait while another process wants the GPU for itself ------------------------------
# The two processes share a block of words. The other process writes the time until which the gate is closed. A time in
# the past means an open gate, so a process that dies leaves no gate closed for long. On the virtual GPU launches call
# `hold` themselves; on a real one the driver's entry points do (`driver_cells`).

# Words of the block. The engine writes the first line, the guest the second.
CLOSED_UNTIL_NS, ALIVE_UNTIL_NS, SHARE = 0, 1, 2  # on CLOCK_MONOTONIC; the share in 2⁻²⁰
LAUNCHES, WAITS, WAITED_NS, CELLS = 8, 9, 10, 11  # CELLS: number of pointers to the driver that lead through the gate
IN_FLIGHT = 12  # kernels that a guest launches before it waits for its stream; 0: it never waits
WORDS = 16
SHARE_UNIT = 1 << 20
LEAST_SHARE = 0.01  # with less, the gate would be open for a shorter time than a waiting guest sleeps
PERIOD_NS = 10_000_000  # for a share below one: the gate is open for that fraction of each period
_SLEEP_S = 100e-6

hold: Callable[[], None] | None = None  # called by launches of the virtual GPU, if there is a gate


class Gate:
    """A gate for Python code."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        self.words = words

    def closed(self, now_ns: int) -> bool:
        return closed_at(self.words, now_ns)

    def wait(self) -> None:
        """Waits until the gate is open."""
        words = self.words
        words[LAUNCHES] += np.uint64(1)
        now = began = time.monotonic_ns()
        while self.closed(now):
            time.sleep(_SLEEP_S)
            now = time.monotonic_ns()
        if now != began:
            words[WAITS] += np.uint64(1)
            words[WAITED_NS] += np.uint64(now - began)


def closed_at(words: NDArray[np.uint64], now_ns: int) -> bool:
    """Whether the gate is closed at this time.

    >>> words = np.zeros(WORDS, np.uint64)
    >>> words[CLOSED_UNTIL_NS] = 100
    >>> closed_at(words, 99), closed_at(words, 100)
    (True, False)
    """
    if now_ns < int(words[CLOSED_UNTIL_NS]):
        return True
    share = int(words[SHARE])
    if share >= SHARE_UNIT or now_ns >= int(words[ALIVE_UNTIL_NS]):
        return False
    return now_ns % PERIOD_NS * SHARE_UNIT >= share * PERIOD_NS


def keep_forever(it: Any) -> None:
    """Never frees an object that libraries use until the process ends, which is after the interpreter has ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(it))


# --- machine code of gates: functions that wait and then call the driver ----------------------------------------------
# The only compiler needed is LLVM, which comes with Numba. Numba itself is not used, because it would take seconds.

_SLEEP_US = 20  # between two looks at a closed gate
_ARGUMENTS = 12  # integers and pointers that are passed on, for any function: the most is eleven
_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _blocks(function: Any, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Basic blocks of a function, and a builder of the code in each."""
    blocks = {name: function.append_basic_block(name) for name in names}
    return blocks, {name: ir.IRBuilder(block) for name, block in blocks.items()}


class _Gate:
    """Machine code of a gate and of all functions behind it, generated at once."""

    def __init__(self, cell: int) -> None:
        self.module, self._cell = ir.Module("paellapy_gate"), cell
        self._now, self._words, self._wait = (
            ir.Function(self.module, ir.FunctionType(_I64, [_I64] * n), name)
            for name, n in (("now_ns", 0), ("words", 0), ("wait", 1))
        )
        self.passes = ir.Function(self.module, ir.FunctionType(ir.VoidType(), []), "passes")
        libc: Any = ctypes.CDLL(None)
        self._make_now(address(libc.clock_gettime))
        code = ir.IRBuilder(self._words.append_basic_block())
        code.ret(self._load(code, _number(cell)))
        self._make_wait(address(libc.usleep))
        self._make_passes()
        self._drain: Any = None

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
        """Reads CLOCK_MONOTONIC into the caller's stack, since any thread may launch."""
        code = ir.IRBuilder(self._now.append_basic_block())
        spec = code.alloca(ir.ArrayType(_I64, 2))
        self._call(code, clock_gettime, ir.FunctionType(_I32, [_I32, spec.type]), [ir.Constant(_I32, 1), spec])
        both = code.load(spec)
        seconds = code.mul(code.extract_value(both, 0), _number(1_000_000_000))
        code.ret(code.add(seconds, code.extract_value(both, 1)))

    def _make_wait(self, usleep: int) -> None:
        """Waits while the gate is closed (see `gate.closed_at`); the words may change during each sleep."""
        blocks, code = _blocks(self._wait, "begin", "look", "share", "alive", "period", "sleep", "end")
        b = code["begin"]
        began = b.call(self._now, [])
        b.branch(blocks["look"])
        b = code["look"]
        words, now = b.phi(_I64), b.phi(_I64)
        words.add_incoming(self._wait.args[0], blocks["begin"])
        now.add_incoming(began, blocks["begin"])
        b.cbranch(b.icmp_unsigned("<", now, self._load(b, words)), blocks["sleep"], blocks["share"])
        b = code["share"]
        share = self._load(b, self._at(b, words, SHARE))
        b.cbranch(b.icmp_unsigned("<", share, _number(SHARE_UNIT)), blocks["alive"], blocks["end"])
        b = code["alive"]
        until = self._load(b, self._at(b, words, ALIVE_UNTIL_NS))
        b.cbranch(b.icmp_unsigned("<", now, until), blocks["period"], blocks["end"])
        b = code["period"]
        part = b.mul(b.urem(now, _number(PERIOD_NS)), _number(SHARE_UNIT))
        over = b.icmp_unsigned(">=", part, b.mul(share, _number(PERIOD_NS)))
        b.cbranch(over, blocks["sleep"], blocks["end"])
        b = code["sleep"]
        self._call(b, usleep, ir.FunctionType(_I32, [_I32]), [ir.Constant(_I32, _SLEEP_US)])
        now.add_incoming(b.call(self._now, []), blocks["sleep"])
        words.add_incoming(b.call(self._words, []), blocks["sleep"])
        b.branch(blocks["look"])
        b = code["end"]
        with b.if_then(b.icmp_unsigned("!=", now, began)):
            self._add(b, words, WAITS, _number(1))
            self._add(b, words, WAITED_NS, b.sub(now, began))
        b.ret(now)

    def _make_passes(self) -> None:
        code = ir.IRBuilder(self.passes.append_basic_block())
        words = code.call(self._words, [])
        self._add(code, words, LAUNCHES, _number(1))
        share = self._load(code, self._at(code, words, SHARE))
        shut = code.icmp_unsigned("!=", self._load(code, words), _number(0))
        with code.if_then(code.or_(shut, code.icmp_unsigned("<", share, _number(SHARE_UNIT))), likely=False):
            code.call(self._wait, [words])
        code.ret_void()

    def before(self, original: int, stream_in: str = "") -> str:
        """Adds a function that waits and then calls the original with all arguments that its caller may have passed
        (the callee ignores surplus ones); returns its name. `stream_in`: the kernel launch function whose argument
        layout it has.
        """
        kind = ir.FunctionType(_I64, [_I64] * _ARGUMENTS)
        made = ir.Function(self.module, kind, f"gated_{original:x}")
        code = ir.IRBuilder(made.append_basic_block())
        # The gate comes last: it may close during the wait for the stream.
        if self._drain is not None and stream_in == "cuLaunchKernel":
            code.call(self._drain, [made.args[8]])
        elif self._drain is not None and stream_in == "cuLaunchKernelEx":  # CUlaunchConfig.hStream
            config = code.add(made.args[0], _number(32))
            code.call(self._drain, [code.load(code.inttoptr(config, _I64.as_pointer()))])
        code.call(self.passes, [])
        code.ret(self._call(code, original, kind, list(made.args)))
        return str(made.name)

    def bound(self, is_capturing: int, query: int) -> None:
        """Makes the guest wait for its stream after a number of kernels, because queued kernels keep running when the
        gate closes. A stream that is being captured is not waited for.
        """
        drain = self._drain = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64]), "drain")
        count = ir.GlobalVariable(self.module, _I64, "kernels")
        count.initializer = _number(0)
        blocks, code = _blocks(drain, "begin", "due", "asks", "look", "end")
        b = code["begin"]
        status = b.alloca(_I32)
        words = b.call(self._words, [])
        most = self._load(b, self._at(b, words, IN_FLIGHT))
        there = self._load(b, self._at(b, words, ALIVE_UNTIL_NS))
        wanted = b.and_(b.icmp_unsigned("!=", most, _number(0)), b.icmp_unsigned("!=", there, _number(0)))
        b.cbranch(wanted, blocks["due"], blocks["end"])
        b = code["due"]
        n = b.atomic_rmw("add", count, _number(1), "monotonic")
        b.cbranch(b.icmp_unsigned("==", b.urem(n, most), _number(0)), blocks["asks"], blocks["end"])
        b = code["asks"]
        kind = ir.FunctionType(_I32, [_I64, status.type])
        failed = self._call(b, is_capturing, kind, [drain.args[0], status])
        captured = b.or_(failed, b.load(status))
        b.cbranch(b.icmp_unsigned("==", captured, ir.Constant(_I32, 0)), blocks["look"], blocks["end"])
        b = code["look"]
        found = self._call(b, query, ir.FunctionType(_I32, [_I64]), [drain.args[0]])
        b.cbranch(b.icmp_unsigned("==", found, ir.Constant(_I32, NOT_READY)), blocks["look"], blocks["end"])
        code["end"].ret_void()


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def gated(
    originals: Mapping[int, str], cell: int, streams: tuple[int, int] | None = None
) -> tuple[dict[int, int], Any]:
    """C functions that wait at the gate whose words are at the address in `cell`, and then call the originals, which
    are given by address and name. Returns them by the originals' addresses, and an object that keeps them alive.
    `streams`: the addresses of cuStreamIsCapturing and cuStreamQuery, for waiting for streams.
    """
    gate_code = _Gate(cell)
    if streams is not None:
        gate_code.bound(*streams)
    names = {original: gate_code.before(original, name) for original, name in originals.items()}
    engine = assembled(gate_code.module)
    return {original: int(engine.get_function_address(name)) for original, name in names.items()}, engine


def assembled(module: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()
    return engine


# A search of this process's memory for words in a range: compiled, and safe from memory that is unmapped meanwhile.


_PIECE_BYTES = 1 << 20


def in_pieces(bounds: list[tuple[int, int]]) -> NDArray[np.uint64]:
    """Rows of start and end, none longer than the search reads at a time, and of whole words.

    >>> in_pieces([(16, 43)]).tolist()
    [[16, 40]]
    """
    rows = [
        (at, min(at + _PIECE_BYTES, start + (end - start) // 8 * 8))
        for start, end in bounds
        for at in range(start, start + (end - start) // 8 * 8, _PIECE_BYTES)
    ]
    return np.array(rows, np.uint64).reshape(-1, 2)


class Finder:
    """Searches memory in one call, without the interpreter's lock, which a busy script releases only every 5 ms.

    Memory is read through /proc/self/mem: another thread may unload a library during the search, and a plain read of
    memory that is gone would end the process. Where this file cannot be read, reads are plain.
    """

    ROOM = 4096  # words found at first; more room is made as needed

    def __init__(self, plain: bool = False) -> None:
        module = ir.Module("paellapy_finder")
        _make_find(module, address(ctypes.CDLL(None).pread))
        self._keep = assembled(module)
        kind = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * 8)
        self._call = kind(self._keep.get_function_address("find"))
        self._found = np.zeros(self.ROOM, np.uint64)
        self._piece = np.zeros(_PIECE_BYTES // 8, np.uint64)
        self.plain = plain or not self._can_read()

    def _can_read(self) -> bool:
        """Whether this process's memory is a file with the right contents."""
        trial = np.array([1, 1 << 40, 3], np.uint64)
        at = int(trial.ctypes.data)
        self.plain = False
        try:
            return self.find(in_pieces([(at, at + trial.nbytes)]), 1 << 40, (1 << 40) + 1) == [at + 8]
        except OSError:
            return False

    def find(self, pieces: NDArray[np.uint64], low: int, high: int) -> list[int]:
        """Addresses of words in `pieces` (see `in_pieces`) that hold a number from `low` to below `high`."""
        if self.plain:
            return self._find(pieces, low, high, 0, 0)
        file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._find(pieces, low, high, file, int(self._piece.ctypes.data))
        finally:
            os.close(file)

    def _find(self, pieces: NDArray[np.uint64], low: int, high: int, file: int, into: int) -> list[int]:
        while True:
            room, found = len(self._found), int(self._found.ctypes.data)
            count = self._call(pieces.ctypes.data, len(pieces), low, high - low, found, room, file, into)
            if count < room:
                addresses: list[int] = self._found[:count].tolist()
                return addresses
            self._found = np.zeros(2 * room, np.uint64)  # some may have been left out


def _load(code: Any, where: Any) -> Any:
    return code.load(code.inttoptr(where, _I64.as_pointer()))


def _make_scan(module: Any) -> Any:
    """for at in range(first, last, 8): if word(at) − low < span: found[seen++] = at + away; while there is room"""
    function = ir.Function(module, ir.FunctionType(_I64, [_I64] * 8), "scan")
    first, last, away, low, span, found, most, before = function.args
    blocks, code = _blocks(function, "begin", "word", "look", "hit", "note", "next", "end")
    code["begin"].branch(blocks["word"])
    b = code["word"]
    at, seen = b.phi(_I64), b.phi(_I64)
    b.cbranch(b.icmp_unsigned("<", at, last), blocks["look"], blocks["end"])
    b = code["look"]
    b.cbranch(b.icmp_unsigned("<", b.sub(_load(b, at), low), span), blocks["hit"], blocks["next"])
    b = code["hit"]
    b.cbranch(b.icmp_unsigned("<", seen, most), blocks["note"], blocks["next"])
    b = code["note"]
    b.store(b.add(at, away), b.inttoptr(b.add(found, b.mul(seen, _number(8))), _I64.as_pointer()))
    more = b.add(seen, _number(1))
    b.branch(blocks["next"])
    b = code["next"]
    now = b.phi(_I64)
    for block, value in (("look", seen), ("hit", seen), ("note", more)):
        now.add_incoming(value, blocks[block])
    following = b.add(at, _number(8))
    b.branch(blocks["word"])
    for phi, at_first, later in ((at, first, following), (seen, before, now)):
        phi.add_incoming(at_first, blocks["begin"])
        phi.add_incoming(later, blocks["next"])
    code["end"].ret(seen)
    return function


def _make_find(module: Any, pread: int) -> None:
    """for start, end in pieces: count = scan(the piece): in place, or with `into` (not 0) as far as pread copied it."""
    scan = _make_scan(module)
    function = ir.Function(module, ir.FunctionType(_I64, [_I64] * 8), "find")
    pieces, rows, low, span, found, most, file, into = function.args
    blocks, code = _blocks(function, "begin", "row", "open", "read", "scan", "end")
    code["begin"].branch(blocks["row"])
    b = code["row"]
    row, count = b.phi(_I64), b.phi(_I64)
    b.cbranch(b.icmp_unsigned("<", row, rows), blocks["open"], blocks["end"])
    b = code["open"]
    where = b.add(pieces, b.mul(row, _number(16)))
    start = _load(b, where)
    length = b.sub(_load(b, b.add(where, _number(8))), start)
    b.cbranch(b.icmp_unsigned("!=", into, _number(0)), blocks["read"], blocks["scan"])
    b = code["read"]
    kind = ir.FunctionType(_I64, [_I32, _I64, _I64, _I64])
    got = b.call(b.inttoptr(_number(pread), kind.as_pointer()), [b.trunc(file, _I32), into, length, start])
    some = b.select(b.icmp_signed(">", got, _number(0)), b.and_(got, _number(-8)), _number(0))
    b.branch(blocks["scan"])
    b = code["scan"]
    first, nbytes = b.phi(_I64), b.phi(_I64)
    for phi, there, copied in ((first, start, into), (nbytes, length, some)):
        phi.add_incoming(there, blocks["open"])
        phi.add_incoming(copied, blocks["read"])
    seen = b.call(scan, [first, b.add(first, nbytes), b.sub(start, first), low, span, found, most, count])
    following = b.add(row, _number(1))
    b.branch(blocks["row"])
    for phi, later in ((row, following), (count, seen)):
        phi.add_incoming(_number(0), blocks["begin"])
        phi.add_incoming(later, blocks["scan"])
    code["end"].ret(count)


LAUNCH_FUNCTIONS = (
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

    def __init__(self, cell: int, library: str = "libcuda.so", names: Iterable[str] = LAUNCH_FUNCTIONS) -> None:
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
        line = next(line for line in loaded_objects() if self._library in line)
        return ctypes.CDLL(line.split(maxsplit=5)[5].strip())

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
