"""Decides how to detect the end of a block: by a barrier at the exit, or by counting its threads out.

A barrier is cheap. But a thread that leaves early, and waits there while others still wait at a barrier of the body,
deadlocks or satisfies the body's barrier in their place. The exit barrier is safe if the body has no barrier, or if no
branch that threads of a block may take differently leads around one. This is decided from the code: registers derived
from the thread's index (or from memory) make a branch divergent, and a divergent branch is harmful if a barrier can be
reached before its two paths meet again.
"""

from __future__ import annotations

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.flow import UNIFORM_SPECIAL, FlowGraph, Names, is_special, written
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.ptx.statements import Statement

BARRIER_OPS = ("bar", "barrier")
# Instructions that give threads different results for equal operands: memory, other threads, matrix fragments.
_PER_THREAD = (
    "atom", "shfl", "activemask", "match", "elect", "tex", "tld4", "suld", "ldmatrix", "mbarrier", "vote", "mma",
    "wmma", "wgmma", "tcgen05", "multimem", "alloca",
)  # fmt: skip


def refuse_exit_in_functions(module: Module, kernel: str) -> None:
    """Refuses `exit` in a device function: it ends the thread without returning, so its end would be missed."""
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
        return False  # a barrier inside a called function is not part of the entry's flow graph
    if not any(s.is_op(*BARRIER_OPS) for s in entry.instructions()):
        return True
    graph = FlowGraph.of(entry)
    if graph is None:
        return False  # indirect branches, or a jump to an unknown place
    return not _divergent_branch_skips_barrier(graph, Names.of(entry))


def _divergent_branch_skips_barrier(graph: FlowGraph, names: Names) -> bool:
    meeting = graph.meeting_points()
    results = [written(s, names) for s in graph.code]
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
                # A value assigned on one path only, or once per iteration of a loop left at different times, differs
                # too.
                for j in region:
                    divergent |= results[j]
    # A predicated barrier is skipped without any branch.
    return any(s.is_op(*BARRIER_OPS) and s.guard in divergent for s in graph.code)


def _reads_divergent(s: Statement, divergent: set[str], names: Names) -> bool:
    if s.guard in divergent:
        return True
    operands = s.operands()
    if s.is_op("ld", "ldu"):
        return not (s.opcode.startswith("ld.param") and any(text in names.params for text in operands))
    if s.is_op(*_PER_THREAD):
        return True
    own = written(s, names)
    for text in operands:
        name = names.register(text)
        if not name or (name in own and operands.count(text) == 1):
            continue
        if name in divergent or (is_special(name) and not name.startswith(UNIFORM_SPECIAL)):
            return True
    return False
