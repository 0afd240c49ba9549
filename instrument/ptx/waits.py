"""Decides from the PTX whether the blocks of a kernel may wait for each other.

A block waits if it repeats a loop until a value in global memory, which others write, lets it leave: a lock, a barrier
over the grid, a flag. Weak loads cannot be waited on (a compiler may read them once), so only volatile, relaxed and
acquiring loads and atomics count. An atomic that makes progress at every execution is not a wait: a counter from which
tiles are drawn, or a compare-and-swap that is repeated with the value it has just found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paellapy.instrument.ptx.flow import FlowGraph, Names, written
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.ptx.statements import Statement

_STRONG = {"volatile", "relaxed", "acquire", "mmio", "cv"}
_OWN_SPACES = (".shared", ".local", ".param", ".const")  # spaces that no other block writes to


def blocks_that_wait(module: Module, entry: Function) -> str:
    """The instruction at which blocks of `entry` wait, as text; empty if none waits."""
    functions = [entry, *(f for f in module.functions() if not f.is_entry)]
    pollers = _pollers(functions)
    for function in functions:
        graph, names = FlowGraph.of(function), Names.of(function)
        if graph is None:  # an indirect branch: any path may be a loop
            watched = next((s for s in function.instructions() if _watches(s)), None)
            if watched is not None:
                return _text(watched)
            continue
        constants = _constants(graph, names)
        meeting = graph.meeting_points()
        for loop in graph.loops():
            if source := _Wait(graph, names, constants, pollers, meeting, loop).find():
                return source
    return ""


def _text(s: Statement) -> str:
    return " ".join(str(s).split()).rstrip(";")


def _watches(s: Statement) -> bool:
    """Whether an instruction reads memory that another block may be writing."""
    if s.is_op("atom"):
        return not any(space in s.opcode for space in _OWN_SPACES)
    if not s.is_op("ld"):
        return False
    return bool(_STRONG & set(s.opcode.split("."))) and not any(space in s.opcode for space in _OWN_SPACES)


def _pollers(functions: list[Function]) -> set[str]:
    """Names of functions that watch memory, themselves or through functions that they call."""
    found = {f.name for f in functions if any(_watches(s) for s in f.instructions())}
    while True:
        more = {f.name for f in functions if any(_calls(s, found) for s in f.instructions())} - found
        if not more:
            return found
        found |= more


def _calls(s: Statement, names: set[str]) -> bool:
    return s.is_op("call") and not names.isdisjoint(s.operands())


def _constants(graph: FlowGraph, names: Names) -> dict[str, int]:
    """Registers that hold the same number wherever they are written."""
    values: dict[str, int | None] = {}
    for s in graph.code:
        for name in written(s, names):
            operands = s.operands()
            value = _number(operands[2]) if s.is_op("mov") and len(operands) == 3 and not s.guard else None
            values[name] = value if name not in values or values[name] == value else None
    return {name: value for name, value in values.items() if value is not None}


def _number(text: str) -> int | None:
    try:
        return int(text.rstrip("U"), 0)
    except ValueError:
        return None


def _arguments(s: Statement) -> list[list[str]]:
    """Operands, split at the commas outside of brackets."""
    found: list[list[str]] = [[]]
    depth = 0
    for text in s.operands():
        depth += (text in "[{(") - (text in ")}]")
        if text == "," and depth == 0:
            found.append([])
        else:
            found[-1].append(text)
    return found


@dataclass(slots=True)
class _Wait:
    """One loop, and the values in it that depend on memory written by other blocks."""

    graph: FlowGraph
    names: Names
    constants: dict[str, int]
    pollers: set[str]
    meeting: list[int]
    loop: set[int]
    _seen: set[str] = field(default_factory=set)  # registers that depend on such reads
    _through_memory: bool = False  # whether such a value is in the block's own memory

    def find(self) -> str:
        """The instruction whose value decides whether the loop is left."""
        sources = [i for i in sorted(self.loop) if self._polls(self.graph.code[i])]
        if not sources or not self._decides():
            return ""
        return _text(self.graph.code[sources[0]])

    def _polls(self, s: Statement) -> bool:
        if _calls(s, self.pollers):
            return True
        return _watches(s) and not (s.is_op("atom") and self._makes_progress(s))

    def _makes_progress(self, s: Statement) -> bool:
        parts, arguments = s.opcode.split("."), _arguments(s)
        operands = [a[0] for a in arguments[2:] if len(a) == 1]
        if "inc" in parts or "dec" in parts:
            return True
        if "add" in parts and operands:
            value = _number(operands[-1])
            return bool(self.constants.get(operands[-1], 0) if value is None else value)
        # repeated with a value of this iteration, or for ever with the same one
        if "cas" in parts and len(operands) == 2:
            compared = self.names.register(operands[0])
            return compared not in self.constants and any(
                compared in written(self.graph.code[i], self.names) for i in self.loop
            )
        return False

    def _decides(self) -> bool:
        changed = True
        while changed:
            before = (len(self._seen), self._through_memory)
            for i in sorted(self.loop):
                s, ways = self.graph.code[i], self.graph.successors[i]
                self._follow(s)
                if s.guard in self._seen and len(ways) > 1:
                    if any(way not in self.loop for way in ways):
                        return True
                    for j in self.graph.region(i, self.meeting[i]) & self.loop:  # assigned on one path only
                        self._seen |= self._results(self.graph.code[j])
            changed = (len(self._seen), self._through_memory) != before
        return False

    def _follow(self, s: Statement) -> None:
        """Propagates the dependence of an instruction's operands to its results."""
        reads = s.guard in self._seen or any(self.names.register(t) in self._seen for t in s.operands())
        own = any(space in s.opcode for space in _OWN_SPACES) or ".global" not in s.opcode
        if s.is_op("ld", "ldu", "ldmatrix"):
            entry_param = s.opcode.startswith("ld.param") and not self.names.params.isdisjoint(s.operands())
            reads |= self._through_memory and own and not entry_param
        if _calls(s, self.pollers) or (reads and s.is_op("st", "call") and own):
            self._through_memory = True
        if reads or self._polls(s):
            self._seen |= self._results(s)

    def _results(self, s: Statement) -> set[str]:
        if s.is_op("bar", "barrier") and ".red" in s.opcode:
            return {name for name in map(self.names.register, _arguments(s)[0]) if name}
        return written(s, self.names)
