"""The control flow of a PTX body: the successors of each instruction, where paths meet, and the registers it writes."""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.ptx.module import Function
from paellapy.instrument.ptx.statements import Kind, Statement

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
