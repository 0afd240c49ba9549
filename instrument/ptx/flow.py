"""The control flow of a PTX body: the successors of each instruction, where paths meet, and the registers it writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from paellapy.instrument.ptx.module import Function, Kind, Module, Statement

# Special registers with the same value in every thread of a block; all others are assumed to differ.
UNIFORM_SPECIAL = (
    "%ctaid", "%nctaid", "%ntid", "%smid", "%nsmid", "%gridid", "%clusterid", "%nclusterid", "%cluster_ctaid",
    "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", "%nwarpid", "%envreg",
)  # fmt: skip
# Instructions that only compute: they change nothing but registers.
COMPUTES = (
    "abs", "add", "and", "bfe", "bfi", "brev", "clz", "cnot", "cvt", "cvta", "div", "ex2", "fma", "isspacep", "lg2",
    "lop3", "mad", "mad24", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc", "prmt", "rcp", "rem",
    "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr", "slct", "sqrt", "sub", "szext", "tanh", "xor",
)  # fmt: skip
_NO_RESULT = ("st", "bra", "brx", "bar", "barrier", "red", "ret", "exit", "call", "membar", "fence", "trap", "prefetch")


@dataclass(slots=True)
class Names:
    """The meaning of names in a body. Inline assembly may give its registers any name, also without "%"."""

    params: set[str]
    registers: set[str]

    @classmethod
    def of(cls, entry: Function) -> Names:
        registers: set[str] = set()
        for statement in entry.body or ():
            if statement.kind is Kind.DIRECTIVE and statement.opcode == ".reg":
                texts = [t.text for t in statement.tokens]
                for i, text in enumerate(texts):
                    if not _is_identifier(text):
                        continue
                    if texts[i + 1] == "<":  # .reg .pred p<3> declares p0, p1, p2
                        registers.update(f"{text}{n}" for n in range(int(texts[i + 2])))
                    else:
                        registers.add(text)
        return cls(set(entry.param_names()), registers)

    def register(self, text: str) -> str:
        """The register that an operand names (without the component of a vector), or ""."""
        name = text if is_special(text) else text.split(".")[0]
        return name if name.startswith("%") or name in self.registers else ""


def _is_identifier(text: str) -> bool:
    return text[0].isalpha() or text[0] in "_$"


@dataclass(slots=True)
class FlowGraph:
    """The instructions of a body and their successors; index len(code) is the exit."""

    code: list[Statement]
    successors: list[list[int]]

    @classmethod
    def of(cls, entry: Function) -> FlowGraph | None:
        code: list[Statement] = []
        labels: dict[tuple[tuple[int, ...], str], int] = {}  # a label is known in its own pair of braces
        scopes: list[tuple[int, ...]] = []  # the braces around each instruction
        scope: tuple[int, ...] = ()
        for position, statement in enumerate(entry.body or ()):
            if statement.kind is Kind.OPEN:
                scope = (*scope, position)
            elif statement.kind is Kind.CLOSE:
                scope = scope[:-1]
            elif statement.kind is Kind.LABEL:
                labels[scope, statement.label] = len(code)
            elif statement.kind is Kind.INSTRUCTION:
                code.append(statement)
                scopes.append(scope)
        successors: list[list[int]] = []
        exit_node = len(code)
        for i, s in enumerate(code):
            if s.is_op("brx"):
                return None
            if s.is_op("bra"):
                to = s.operands()[-1:]
                around = (scopes[i][:n] for n in range(len(scopes[i]), -1, -1))  # innermost first
                target = next((labels[b, to[0]] for b in around if to and (b, to[0]) in labels), None)
                if target is None:
                    return None
                ways = [target]
            elif s.is_op("ret", "exit", "trap"):
                ways = [exit_node]
            else:
                ways = [i + 1]
            if s.guard and ways != [i + 1]:
                ways.append(i + 1)
            successors.append(ways)
        return cls(code, successors)

    def meeting_points(self) -> list[int]:
        """Immediate post-dominator of every instruction (Cooper, Harvey and Kennedy's iteration, on the reversed
        graph)."""
        exit_node = len(self.code)
        predecessors: list[list[int]] = [[] for _ in range(exit_node + 1)]
        for i, ways in enumerate(self.successors):
            for way in ways:
                predecessors[way].append(i)
        order: list[int] = []  # post-order from the exit, against the edges
        seen = {exit_node}
        stack = [(exit_node, iter(predecessors[exit_node]))]
        while stack:
            node, rest = stack[-1]
            for before in rest:
                if before not in seen:
                    seen.add(before)
                    stack.append((before, iter(predecessors[before])))
                    break
            else:
                order.append(node)
                stack.pop()
        rank = {node: i for i, node in enumerate(order)}
        meet = [-1] * (exit_node + 1)
        meet[exit_node] = exit_node
        changed = True
        while changed:
            changed = False
            for node in reversed(order[:-1]):
                best = -1
                for way in self.successors[node]:
                    if meet[way] < 0:
                        continue
                    best = way if best < 0 else self._common(best, way, meet, rank)
                if best != meet[node]:
                    meet[node] = best
                    changed = True
        return meet

    @staticmethod
    def _common(a: int, b: int, meet: list[int], rank: dict[int, int]) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = meet[a]
            while rank[b] < rank[a]:
                b = meet[b]
        return a

    def loops(self) -> list[set[int]]:
        """The loop of every backward jump: the instructions that can run between its target and the jump.

        Two jumps to one target give two loops, often one inside the other: the text does not show it.
        """
        before: list[list[int]] = [[] for _ in range(len(self.code) + 1)]
        for i, ways in enumerate(self.successors):
            for way in ways:
                before[way].append(i)
        jumps = [(i, way) for i, ways in enumerate(self.successors) for way in ways if way <= i]
        loops = []
        for jump, target in jumps:
            into = _reached(jump, before, target)
            if target in into:
                loops.append(into & _reached(target, self.successors, -1))
        return loops

    def region(self, branch: int, meeting: int) -> set[int]:
        """Instructions that can run between a branch and the point where its paths meet."""
        found: set[int] = set()
        pending = [w for w in self.successors[branch] if w != meeting]
        while pending:
            node = pending.pop()
            if node not in found and node < len(self.code):
                found.add(node)
                pending += [w for w in self.successors[node] if w != meeting]
        return found


def _reached(start: int, ways: list[list[int]], stop: int) -> set[int]:
    """Everything that can be reached along `ways` without continuing from `stop`."""
    found, pending = {start}, [start] if start != stop else []
    while pending:
        for way in ways[pending.pop()]:
            if way not in found and way < len(ways):
                found.add(way)
                if way != stop:
                    pending.append(way)
    return found


def written(s: Statement, names: Names) -> set[str]:
    if s.is_op(*_NO_RESULT):
        return set()
    found: set[str] = set()
    depth = 0
    for text in s.operands():
        depth += (text == "{") - (text == "}")
        if text == "," and depth == 0:
            break
        if name := names.register(text):
            found.add(name)
    return found


def is_special(name: str) -> bool:
    return name.split(".")[0] in _SPECIAL or name.startswith(("%lanemask", "%clock", "%globaltimer", "%pm", "%envreg"))


_SPECIAL = frozenset(("%tid", "%laneid", "%warpid", *UNIFORM_SPECIAL))


# --- decides from the PTX whether the blocks of a kernel may wait for each other --------------------------------------
# A block waits if it repeats a loop until a value in global memory, which others write, lets it leave: a lock, a
# barrier over the grid, a flag. Weak loads cannot be waited on (a compiler may read them once), so only volatile,
# relaxed and acquiring loads and atomics count. An atomic that makes progress at every execution is not a wait: a
# counter from which tiles are drawn, or a compare-and-swap that is repeated with the value it has just found.

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
