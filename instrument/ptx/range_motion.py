"""Moves the arithmetic of addresses ahead of a clock reading at the end of a range.

ptxas computes the addresses of the next copies while a matrix instruction runs, but it moves no instruction across a
reading of the clock. With a reading after the matrix instruction, the copies would wait for their addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from paellapy.instrument.ptx.flow import COMPUTES, Names, is_special, written
from paellapy.instrument.ptx.statements import Kind, Statement

_ACCESSES = ("ld", "ldmatrix", "st", "stmatrix", "cp", "atom", "red", "prefetch", "wgmma")
_FLOAT = re.compile(r"\.(b?f\d|tf32|e\dm\d)")


def early_addresses(
    body: list[Statement], lines: Iterable[range], readings: Mapping[int, bool], names: Names
) -> dict[int, int]:
    """Statements that move: the place of each, and the place of the reading before which it goes.

    `lines` are straight lines of code. `readings` says for each place whether statements may move ahead of it: not
    where a range begins, since its own arithmetic would leave it. Only code behind an asynchronous matrix instruction
    moves, since elsewhere nothing hides its time.
    """
    pending: set[str] = set()  # registers that matrix instructions write at some later time
    for s in body:
        if s.is_op("wgmma", "tcgen05"):
            pending |= written(s, names)
    moved: dict[int, int] = {}
    for line in lines:
        start = next((i for i in line if body[i].is_op("wgmma")), line.stop)
        if any(readings.get(i) for i in range(start, line.stop)):
            moved |= _early(body, range(start, line.stop), readings, names, pending)
    return moved


def _early(
    body: list[Statement], line: range, readings: Mapping[int, bool], names: Names, pending: set[str]
) -> dict[int, int]:
    addresses = _addresses(body, line, names)
    moved: dict[int, int] = {}
    depth, reading = 0, line.start
    used: set[str] = set()  # registers of the statements that stay behind the last reading
    changed: set[str] = set()
    for i in line:
        s = body[i]
        if i in readings:
            depth, reading, used, changed = 0, i, set(), set()
        depth += (s.kind is Kind.OPEN) - (s.kind is Kind.CLOSE)
        results, mine = written(s, names), _mentioned(s, names)
        early = depth == 0 and results and results <= addresses and _computes_integers(s) and not mine & pending
        if readings.get(reading) and early and not results & used and not mine & changed:
            moved[i] = reading
        else:
            used |= mine
            changed |= results
    return moved


def _addresses(body: list[Statement], line: range, names: Names) -> set[str]:
    """Registers from which the line's accesses to memory take their addresses, directly or through arithmetic."""
    found: set[str] = set()
    for i in reversed(line):
        s = body[i]
        if s.is_op(*_ACCESSES):
            found |= _address_operands(s, names)
        elif _computes_integers(s) and written(s, names) & found:
            found |= _mentioned(s, names)
    return found


def _address_operands(s: Statement, names: Names) -> set[str]:
    """Registers in brackets; of copies and matrix instructions all but vectors: also sizes and descriptors."""
    found: set[str] = set()
    brackets = braces = 0
    for text in s.operands():
        brackets += (text == "[") - (text == "]")
        braces += (text == "{") - (text == "}")
        if (brackets or (s.is_op("cp", "wgmma") and not braces)) and (name := names.register(text)):
            found.add(name)
    return found


def _mentioned(s: Statement, names: Names) -> set[str]:
    return {name for text in (s.guard, *s.operands()) if text and (name := names.register(text))}


def _computes_integers(s: Statement) -> bool:
    """Whether it computes integers from its operands alone. Arithmetic with a carry (`add.cc`) also sets a flag."""
    if s.guard or not s.is_op(*COMPUTES) or ".cc" in s.opcode or _FLOAT.search(s.opcode):
        return False
    return not any(map(is_special, s.operands()))
