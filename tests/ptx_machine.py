"""Runs the blocks of a small PTX kernel on a host: every thread on its own, in any order.

It knows the instructions that the `preempt` and `slice` passes insert, and those of the kernels in their tests. Copies
to shared memory arrive late: when they are waited for, and never before. Registers keep a value per thread; a register
that is read before it was written, and an instruction that is not known, raise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paellapy.instrument.ptx.flow import FlowGraph
from paellapy.instrument.ptx.module import Module, Statement

WORD = 0xFFFFFFFF
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__,
}  # fmt: skip
_COMPUTES: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
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
    """A kernel that can be launched on `memory`, words of four bytes by address."""

    def __init__(self, ptx: str, threads: int) -> None:
        entry = Module.parse(ptx).entry()
        graph = FlowGraph.of(entry)
        assert graph is not None
        self.code, self.ways, self.threads = graph.code, graph.successors, threads
        self.params = entry.param_names()

    def launch(self, memory: dict[int, int], blocks: int, params: list[bytes]) -> list[Block]:
        given = dict(zip(self.params, params, strict=True))
        return [Block(self, memory, given, k, blocks) for k in range(blocks)]


class Block:
    def __init__(self, kernel: Kernel, memory: dict[int, int], params: dict[str, bytes], index: int, n: int) -> None:
        self.kernel, self.memory, self.params = kernel, memory, params
        self.shared: dict[int, int] = {}
        place = {"%ctaid.x": index, "%ctaid.y": 0, "%ctaid.z": 0, "%nctaid.x": n, "%nctaid.y": 1, "%nctaid.z": 1}
        self.live = [Thread({**place, "%tid.x": t, "%tid.y": 0, "%tid.z": 0}) for t in range(kernel.threads)]

    def ready(self) -> list[Thread]:
        """The threads that can execute an instruction now; empty once the block is over."""
        return [t for t in self.live if t.waits < 0]

    def step(self, t: Thread) -> None:
        """Executes one instruction of a thread."""
        if t.at == len(self.kernel.code):
            return self._leave(t)
        s, here = self.kernel.code[t.at], t.at
        taken = not s.guard or bool(t.registers[s.guard]) != (s.tokens[1].text == "!")
        if s.is_op("bra", "ret"):
            t.at = self.kernel.ways[here][0 if taken else -1]
            return None
        t.at += 1
        if not taken:
            return None
        if s.is_op("bar", "vote"):
            t.at, t.waits = here, here
            return self._meet()
        return self._run(t, s)

    def _leave(self, t: Thread) -> None:
        assert not t.copies, "a copy would arrive in the memory of the next block"
        self.live.remove(t)
        self._meet()

    def _meet(self) -> None:
        """Lets threads go on once all that live wait at one place."""
        if not self.live or any(t.waits != self.live[0].waits or t.waits < 0 for t in self.live):
            assert not self.live or self.ready(), "threads of a block wait at different places"
            return
        s = self.kernel.code[self.live[0].waits]
        if not s.opcode.endswith(".sync"):
            values = [arguments(s) for _ in self.live]
            source = values[0][1 if s.is_op("vote") else 2]
            result = any(t.registers[source] for t in self.live)
            for t in self.live:
                t.registers[values[0][0]] = int(result)
        for t in self.live:
            t.at, t.waits = t.waits + 1, -1

    def _run(self, t: Thread, s: Statement) -> None:
        name, parts, given = s.opcode.split(".")[0], s.opcode.split("."), arguments(s)
        if name == "setp":
            first, second = self._value(t, given[1]), self._value(t, given[2])
            found = int(_COMPARES[parts[1]](first, second))
            t.registers[given[0]] = found & self._value(t, given[3]) if parts[2] == "and" else found
        elif name in _COMPUTES:
            wide = "wide" in parts or parts[-1][1:] == "64"
            result = _COMPUTES[name](*(self._value(t, g) for g in given[1:]))
            t.registers[given[0]] = result & (WORD << 32 | WORD if wide else WORD)
        elif name == "ld" and "param" in parts:
            base, _, offset = given[1][1:-1].partition("+")
            size = int(parts[-1][1:]) // 8
            t.registers[given[0]] = int.from_bytes(self.params[base][int(offset or 0) :][:size], "little")
        elif name == "ld":
            t.registers[given[0]] = self._space(parts)[self._address(t, given[1])]
        elif name == "st":
            self._space(parts)[self._address(t, given[0])] = self._value(t, given[1])
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

    def _space(self, parts: list[str]) -> dict[int, int]:
        return self.shared if "shared" in parts else self.memory

    def _address(self, t: Thread, text: str) -> int:
        base, _, offset = text[1:-1].partition("+")
        return self._value(t, base) + int(offset or 0)

    def _value(self, t: Thread, text: str) -> int:
        if text in t.special:
            return t.special[text]
        return t.registers[text] if text.startswith("%") else int(text, 0)


def arguments(s: Statement) -> list[str]:
    """The operands of an instruction, as texts."""
    return "".join(s.operands()).split(",")


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
