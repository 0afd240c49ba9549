"""One thread of a PTX kernel at a time, for integers: the instructions that the passes write, without a GPU.

Threads do not wait for each other, so a barrier does nothing. The clock advances by ten at every reading.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

from paellapy.instrument.ptx.module import Kind, Module, Statement

_BITS = {"pred": 1, "u32": 32, "s32": 32, "b32": 32, "u64": 64, "b64": 64}
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "shr": lambda a, b: a >> b,
    "mul": lambda a, b: a * b, "sub": lambda a, b: a - b,
}  # fmt: skip
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
}  # fmt: skip


class Grid:
    """Runs every thread of a grid: `params` are the parameters' bytes, `memory` holds words by address."""

    def __init__(self, ptx: str, params: dict[str, bytes], grid: tuple[int, int, int], threads: int) -> None:
        self.body = [s for s in Module.parse(ptx).entry().body or () if s.kind in (Kind.INSTRUCTION, Kind.LABEL)]
        self.labels = {s.label: i for i, s in enumerate(self.body) if s.kind is Kind.LABEL}
        self.params, self.grid, self.threads = params, grid, threads
        self.memory: dict[int, int] = {}

    def run(self) -> None:
        gx, gy, gz = self.grid
        for block in range(gx * gy * gz):
            place = {"x": block % gx, "y": block // gx % gy, "z": block // (gx * gy)}
            clock = count(1000, 10)
            for thread in range(self.threads):
                special = {"%tid.x": thread, "%tid.y": 0, "%tid.z": 0}
                special |= {"%ntid.x": self.threads, "%ntid.y": 1, "%ntid.z": 1}
                special |= {f"%ctaid.{axis}": at for axis, at in place.items()}
                special |= {f"%nctaid.{axis}": n for axis, n in zip("xyz", self.grid, strict=True)}
                self._thread(special | {"%smid": 0, "%globaltimer_lo": 7}, clock)

    def _thread(self, special: dict[str, int], clock: Any) -> None:
        self.registers: dict[str, int] = {}
        at = 0
        while self.body[at].opcode not in ("ret", "exit") or not self._runs(self.body[at]):
            s = self.body[at]
            at += 1
            if s.kind is Kind.LABEL or s.opcode == ";" or s.is_op("bar", "barrier") or not self._runs(s):
                continue
            if s.is_op("bra"):
                at = self.labels[s.operands()[-1]]
            else:
                self._step(s, lambda text: next(clock) if text == "%clock" else special.get(text))

    def _runs(self, s: Statement) -> bool:
        return not s.guard or bool(self.registers[s.guard]) != (s.tokens[1].text == "!")

    def _step(self, s: Statement, special: Callable[[str], int | None]) -> None:
        op, *rest = s.opcode.split(".")
        bits = _BITS[rest[-1]]

        def value(text: str) -> int:
            found = special(text)
            return found if found is not None else self.registers[text] if text[0] == "%" else int(text)

        operands = _operands(s)
        if op == "st":
            for i, text in enumerate(_parts(operands[1])):
                self.memory[self._address(operands[0]) + 4 * i] = value(text)
        elif op == "ld" and "param" in rest:
            name, _, offset = operands[1][1:-1].partition("+")
            (self.registers[operands[0]],) = struct.unpack_from("<Q" if bits == 64 else "<I", self.params[name],
                                                                int(offset or 0))  # fmt: skip
        elif op == "atom":
            self.registers[operands[0]] = self.memory.get(self._address(operands[1]), 0)
            self.memory[self._address(operands[1])] = self.registers[operands[0]] + value(operands[2])
        elif op == "mov" and operands[1].startswith("{"):
            low, high = map(value, _parts(operands[1]))
            self.registers[operands[0]] = high << 32 | low
        elif op == "mov" and operands[0].startswith("{"):
            for i, text in enumerate(_parts(operands[0])):
                self.registers[text] = value(operands[1]) >> 32 * i & 0xFFFFFFFF
        else:
            given = [value(text) for text in operands[1:]]
            self.registers[operands[0]] = self._computed(op, rest, given) % (1 << (64 if "wide" in rest else bits))

    def _computed(self, op: str, rest: list[str], given: list[int]) -> int:
        if op == "mov":
            return given[0]
        if op == "not":
            return ~given[0]
        if op == "setp":
            return int(_COMPARED[rest[0]](*given))
        if op == "mad":
            a = given[0] - (1 << 32) if rest[-1] == "s32" and given[0] >> 31 else given[0]
            return a * given[1] + given[2]
        return _BINARY[op](*given)

    def _address(self, text: str) -> int:
        register, _, offset = text[1:-1].partition("+")
        return self.registers[register] + int(offset or 0)


def _operands(s: Statement) -> list[str]:
    """The operands with brackets and braces kept together."""
    found, depth = [""], 0
    for text in s.operands():
        depth += (text in "[{") - (text in "]}")
        if text == "," and not depth:
            found.append("")
        else:
            found[-1] += text
    return found


def _parts(vector: str) -> list[str]:
    return vector.strip("{}").split(",")
