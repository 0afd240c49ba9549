"""A search of this process's memory for words in a range: compiled, and safe from memory that is unmapped meanwhile."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from paellapy.instrument.device.gate_code import address, assembled

_PIECE_BYTES = 1 << 20
_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


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
    blocks = {
        name: function.append_basic_block(name) for name in ("begin", "word", "look", "hit", "note", "next", "end")
    }
    code = {name: ir.IRBuilder(block) for name, block in blocks.items()}
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
    blocks = {name: function.append_basic_block(name) for name in ("begin", "row", "open", "read", "scan", "end")}
    code = {name: ir.IRBuilder(block) for name, block in blocks.items()}
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
