"""Decides how the end of a block can be seen: by a barrier at the exit, or by counting its threads out.

A barrier is cheap, but a thread that leaves early and waits there while others still wait at a barrier of the body
deadlocks, or satisfies the body's barrier in their place. It is safe when the body has no barrier, or when no branch
that threads of a block may take differently leads around one. That is decided here from the code: registers derived
from the thread's index (or from memory) make a branch divergent, and a divergent branch is harmful when a barrier can
be reached before its two ways meet again.
"""

from __future__ import annotations

from dataclasses import dataclass

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx import Function, Kind, Module, Statement

BARRIER_OPS = ("bar", "barrier")
# Special registers with the same value in every thread of a block; all others are taken as different.
_UNIFORM_SPECIAL = (
    "%ctaid", "%nctaid", "%ntid", "%smid", "%nsmid", "%gridid", "%clusterid", "%nclusterid", "%cluster_ctaid",
    "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%dynamic_smem_size",
    "%total_smem_size", "%aggr_smem_size", "%nwarpid", "%envreg",
)  # fmt: skip
# Give different threads different results whatever their operands: memory, other threads, pieces of a matrix.
_PER_THREAD = (
    "atom", "shfl", "activemask", "match", "elect", "tex", "tld4", "suld", "ldmatrix", "mbarrier", "vote", "mma",
    "wmma", "wgmma", "tcgen05", "multimem", "alloca",
)  # fmt: skip
_NO_RESULT = ("st", "bra", "brx", "bar", "barrier", "red", "ret", "exit", "call", "membar", "fence", "trap", "prefetch")


def refuse_exit_in_functions(module: Module, kernel: str) -> None:
    """`exit` in a device function ends the thread behind the caller's back: its end could not be reported."""
    for function in module.functions():
        if not function.is_entry and any(s.is_op("exit") for s in function.instructions()):
            raise InstrumentError(
                f"kernel {kernel!r} cannot be instrumented: its device function {function.name!r} executes `exit`, "
                "so a block's end would be missed. Return from the function instead, or let it be inlined "
                "(__forceinline__)."
            )


def barrier_at_exit_is_safe(module: Module, entry: Function) -> bool:
    """Whether every thread of a block may wait for the others at the exit of `entry`."""
    if any(s.is_op(*BARRIER_OPS) for f in module.functions() if not f.is_entry for s in f.instructions()):
        return False  # a barrier inside a called function is not placed in the entry's flow graph
    if not any(s.is_op(*BARRIER_OPS) for s in entry.instructions()):
        return True
    graph = _FlowGraph.of(entry)
    if graph is None:
        return False  # indirect branches, or a jump to where we cannot follow
    return not _divergent_branch_skips_barrier(graph, _Names.of(entry))


@dataclass(slots=True)
class _Names:
    """What the names in a body stand for. Inline assembly may call its registers anything, also without "%"."""

    params: set[str]
    registers: set[str]

    @classmethod
    def of(cls, entry: Function) -> _Names:
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
        """The register an operand names (without the component of a vector), or ""."""
        name = text if _is_special(text) else text.split(".")[0]
        return name if name.startswith("%") or name in self.registers else ""


def _is_identifier(text: str) -> bool:
    return text[0].isalpha() or text[0] in "_$"


@dataclass(slots=True)
class _FlowGraph:
    """Instructions of a body and where each may go next; index len(code) is the exit."""

    code: list[Statement]
    successors: list[list[int]]

    @classmethod
    def of(cls, entry: Function) -> _FlowGraph | None:
        code: list[Statement] = []
        labels: dict[tuple[tuple[int, ...], str], int] = {}  # a label is known in its own pair of braces
        scopes: list[tuple[int, ...]] = []  # of each instruction: the braces around it
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

    def region(self, branch: int, meeting: int) -> set[int]:
        """Instructions that can run between a branch and the point where its ways meet."""
        found: set[int] = set()
        pending = [w for w in self.successors[branch] if w != meeting]
        while pending:
            node = pending.pop()
            if node not in found and node < len(self.code):
                found.add(node)
                pending += [w for w in self.successors[node] if w != meeting]
        return found


def _divergent_branch_skips_barrier(graph: _FlowGraph, names: _Names) -> bool:
    meeting = graph.meeting_points()
    results = [_results(s, names) for s in graph.code]
    divergent: set[str] = set()
    branches: set[int] = set()
    changed = True
    while changed:
        changed = False
        for i, s in enumerate(graph.code):
            if not results[i] <= divergent and _reads_divergent(s, divergent, names):
                divergent |= results[i]
                changed = True
            if s.guard in divergent and len(graph.successors[i]) > 1 and i not in branches:
                branches.add(i)
                changed = True
                region = graph.region(i, meeting[i])
                if any(graph.code[j].is_op(*BARRIER_OPS) for j in region):
                    return True
                # What is assigned on one way only, or once per turn of a loop left at different times, differs too.
                for j in region:
                    divergent |= results[j]
    # A predicated barrier is skipped without any branch.
    return any(s.is_op(*BARRIER_OPS) and s.guard in divergent for s in graph.code)


def _results(s: Statement, names: _Names) -> set[str]:
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


def _reads_divergent(s: Statement, divergent: set[str], names: _Names) -> bool:
    if s.guard in divergent:
        return True
    operands = s.operands()
    if s.is_op("ld", "ldu"):
        return not (s.opcode.startswith("ld.param") and any(text in names.params for text in operands))
    if s.is_op(*_PER_THREAD):
        return True
    own = _results(s, names)
    for text in operands:
        name = names.register(text)
        if not name or (name in own and operands.count(text) == 1):
            continue
        if name in divergent or (_is_special(name) and not name.startswith(_UNIFORM_SPECIAL)):
            return True
    return False


def _is_special(name: str) -> bool:
    return name.split(".")[0] in _SPECIAL or name.startswith(("%lanemask", "%clock", "%globaltimer", "%pm", "%envreg"))


_SPECIAL = frozenset(("%tid", "%laneid", "%warpid", *_UNIFORM_SPECIAL))
