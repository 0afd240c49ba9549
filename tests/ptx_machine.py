"""Runs the blocks of a small PTX kernel on a host: every thread on its own, in any order.

It knows the instructions that the passes insert, and those of the kernels in their tests. Copies to shared memory
arrive late: when they are waited for, and never before. Registers keep a value per thread; a register that is read
before it was written, and an instruction that is not known, raise. A block's clock advances by ten at every reading.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from paellapy.instrument.ptx.flow import FlowGraph
from paellapy.instrument.ptx.module import Module, Statement

Memory = dict[int, int]  # words of four bytes by address
_BITS = {"pred": 1, "u32": 32, "s32": 32, "b32": 32, "u64": 64, "s64": 64, "b64": 64}
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__,
}  # fmt: skip
_COMPUTES: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "not": lambda a: ~a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b,
    "mad": lambda a, b, c: a * b + c,
}


@dataclass(eq=False)
class Thread:
    """One thread: its registers, the next instruction, and the barrier or vote that it waits at."""

    special: dict[str, int]
    registers: dict[str, int] = field(default_factory=dict)
    at: int = 0
    waits: int = -1
    done: bool = False
    copies: list[tuple[int, int]] = field(default_factory=list)  # to shared memory: (to, from)


class Kernel:
    """A kernel that can be launched on a memory."""

    def __init__(self, ptx: str, threads: int) -> None:
        entry = Module.parse(ptx).entry()
        graph = FlowGraph.of(entry)
        assert graph is not None
        self.code, self.ways, self.threads = graph.code, graph.successors, threads
        self.parts = [s.opcode.split(".") for s in graph.code]
        self.operands = [arguments(s) for s in graph.code]
        self.params = entry.param_names()

    def launch(self, memory: Memory, grid: tuple[int, int, int], params: list[bytes]) -> list[Block]:
        given = dict(zip(self.params, params, strict=True))
        gx, gy, gz = grid
        return [Block(self, memory, given, (k % gx, k // gx % gy, k // (gx * gy)), grid) for k in range(gx * gy * gz)]


class Block:
    def __init__(
        self, kernel: Kernel, memory: Memory, params: dict[str, bytes], place: tuple[int, ...], grid: tuple[int, ...]
    ) -> None:
        self.kernel, self.memory, self.params = kernel, memory, params
        self.shared: Memory = {}
        self.clock = count(1000, 10)
        special = {"%smid": 0, "%globaltimer_lo": 7}
        for axis, at, blocks, n in zip("xyz", place, grid, (kernel.threads, 1, 1), strict=True):
            special |= {f"%ctaid.{axis}": at, f"%nctaid.{axis}": blocks, f"%tid.{axis}": 0, f"%ntid.{axis}": n}
        self.live = [Thread({**special, "%tid.x": t}) for t in range(kernel.threads)]

    def run(self) -> None:
        """Runs the block to its end, each thread for as long as it can."""
        while self.live:
            thread = self.ready()[0]
            while thread in self.live and thread.waits < 0:
                self.step(thread)

    def ready(self) -> list[Thread]:
        """The threads that can execute an instruction now; empty once the block is over."""
        return [t for t in self.live if t.waits < 0]

    def step(self, t: Thread) -> None:
        """Executes one instruction of a thread."""
        if t.at == len(self.kernel.code):
            return self._leave(t)
        s, here = self.kernel.code[t.at], t.at
        taken = not s.guard or bool(t.registers[s.guard]) != (s.tokens[1].text == "!")
        if s.is_op("bra", "ret", "exit"):
            t.at = self.kernel.ways[here][0 if taken else -1]
            return None
        t.at += 1
        if not taken:
            return None
        if s.is_op("bar", "barrier", "vote"):
            t.at, t.waits = here, here
            return self._meet()
        return self._run(t, here)

    def _leave(self, t: Thread) -> None:
        assert not t.copies, "a copy would arrive in the memory of the next block"
        self.live.remove(t)
        self._meet()

    def _meet(self) -> None:
        """Lets threads go on once all that live wait at one place."""
        if not self.live or any(t.waits != self.live[0].waits or t.waits < 0 for t in self.live):
            assert not self.live or self.ready(), "threads of a block wait at different places"
            return
        parts, given = self.kernel.parts[self.live[0].waits], self.kernel.operands[self.live[0].waits]
        if parts[-1] != "sync":
            source = given[1 if parts[0] == "vote" else 2]
            result = any(t.registers[source] for t in self.live)
            for t in self.live:
                t.registers[given[0]] = int(result)
        for t in self.live:
            t.at, t.waits = t.waits + 1, -1

    def _run(self, t: Thread, at: int) -> None:
        s, parts, given = self.kernel.code[at], self.kernel.parts[at], self.kernel.operands[at]
        name = parts[0]
        bits = 64 if "wide" in parts else _BITS.get(parts[-1])
        if name == "setp":
            first, second = self._value(t, given[1]), self._value(t, given[2])
            found = int(_COMPARES[parts[1]](first, second))
            t.registers[given[0]] = found & self._value(t, given[3]) if parts[2] == "and" else found
        elif name == "mov" and given[1].startswith("{"):
            low, high = (self._value(t, each) for each in elements(given[1]))
            t.registers[given[0]] = high << 32 | low
        elif name == "mov" and given[0].startswith("{"):
            for i, each in enumerate(elements(given[0])):
                t.registers[each] = self._value(t, given[1]) >> 32 * i & 0xFFFFFFFF
        elif name in _COMPUTES:
            first, *others = (self._value(t, g) for g in given[1:])
            if parts[-1] == "s32" and first >> 31:
                first -= 1 << 32
            t.registers[given[0]] = _COMPUTES[name](first, *others) % (1 << bits)
        elif name == "ld" and "param" in parts:
            base, _, offset = given[1][1:-1].partition("+")
            t.registers[given[0]] = int.from_bytes(self.params[base][int(offset or 0) :][: bits // 8], "little")
        elif name == "ld":
            t.registers[given[0]] = self._space(parts)[self._address(t, given[1])]
        elif name == "st":
            for i, each in enumerate(elements(given[1])):
                self._space(parts)[self._address(t, given[0]) + 4 * i] = self._value(t, each)
        elif name == "atom":
            where = self._address(t, given[1])
            t.registers[given[0]] = self.memory[where]
            self.memory[where] += self._value(t, given[2])
        elif s.opcode == "cp.async.ca.shared.global":
            t.copies.append((self._address(t, given[0]), self._address(t, given[1])))
        elif s.opcode == "cp.async.wait_all":
            for to, source in t.copies:
                self.shared[to] = self.memory[source]
            t.copies = []
        else:
            raise NotImplementedError(str(s))

    def _space(self, parts: list[str]) -> Memory:
        return self.shared if "shared" in parts else self.memory

    def _address(self, t: Thread, text: str) -> int:
        base, _, offset = text[1:-1].partition("+")
        return self._value(t, base) + int(offset or 0)

    def _value(self, t: Thread, text: str) -> int:
        if text == "%clock":
            return next(self.clock)
        if text in t.special:
            return t.special[text]
        return t.registers[text] if text.startswith("%") else int(text, 0)


def arguments(s: Statement) -> list[str]:
    """The operands of an instruction, as texts, with brackets and braces kept together."""
    found, depth = [""], 0
    for text in s.operands():
        depth += (text in "[{") - (text in "]}")
        if text == "," and not depth:
            found.append("")
        else:
            found[-1] += text
    return found


def elements(operand: str) -> list[str]:
    """The registers of a vector, or the one."""
    return operand.strip("{}").split(",")


def steps(blocks: list[Block], choose: Callable[[int], int], together: int) -> Iterator[None]:
    """Runs blocks to their end, some of them together, one instruction of one thread at a time."""
    waiting = list(blocks)
    running: list[Block] = []
    while waiting or running:
        while waiting and len(running) < together:
            running.append(waiting.pop(0))
        block = running[choose(len(running))]
        ready = block.ready()
        if not ready:
            running.remove(block)
            continue
        block.step(ready[choose(len(ready))])
        yield


def packed(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}Q", *words)
