"""The `preempt` pass: a block that starts while its launch's flag is set does not run; it records its number and exits.

One thread of the block reads the flag, and a barrier with a reduction tells all others: every block decides as one,
without shared memory. The read is issued first and its result is needed last, after the loads with which the kernel
begins: the round trip to L2 is hidden behind theirs. Loads change nothing, so a block that leaves there has no effect.

A flag is a number. A launch also has a number (`epoch`), and is preempted unless the flag is below it. So a launch that
is made later is not affected by a flag that was set before.
"""

from __future__ import annotations

from collections.abc import Callable

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.flow import COMPUTES, Names, written
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, statements
from paellapy.instrument.ptx.waits import blocks_that_wait
from paellapy.instrument.records import FLAG_COPIES, FLAG_COPY_BYTES, LEFT_HEAD_BYTES

Load = Callable[[str, str], str]  # (register, field of the descriptor) → the instruction that loads it


def refuse_unpreemptible(module: Module, entry: Function) -> None:
    """Raises for kernels whose blocks cannot run without each other."""
    cluster = entry.directive(".reqnctapercluster")
    decided_at_launch = cluster is None and entry.directive(".explicitcluster") is not None
    if decided_at_launch or max(cluster or (1,)) > 1:
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be preempted: the blocks of a cluster must run together, but would be "
            "preempted one by one. Launch it without clusters."
        )
    if waited_at := blocks_that_wait(module, entry):
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be preempted: its blocks wait for each other in a loop around "
            f"`{waited_at}`, and would wait for ever for a block that does not run. Launch it without `preemptible`."
        )


def insert_decision(entry: Function, load: Load, thread_index_bits: str) -> None:
    """Inserts the decision after the loads with which the kernel begins. `slice` then renumbers the recorded block."""
    assert entry.body is not None
    at = _after_first_loads(entry)
    entry.body[at:at] = statements(f"""
	{load("%paellapy_pe", "epoch")}
	setp.ge.u32 %paellapy_pp, %paellapy_pw, %paellapy_pe;
	bar.red.or.pred %paellapy_pp, 0, %paellapy_pp;
	@!%paellapy_pp bra $paellapy_run;
	{thread_index_bits}
	setp.ne.u32 %paellapy_pp, %paellapy_pt, 0;
	@%paellapy_pp bra $paellapy_noted;
	mov.u32 %paellapy_pt, %ctaid.z;
	mov.u32 %paellapy_pu, %nctaid.y;
	mov.u32 %paellapy_pw, %ctaid.y;
	mad.lo.u32 %paellapy_pt, %paellapy_pt, %paellapy_pu, %paellapy_pw;
	mov.u32 %paellapy_pu, %nctaid.x;
	mov.u32 %paellapy_pw, %ctaid.x;
	mad.lo.u32 %paellapy_pt, %paellapy_pt, %paellapy_pu, %paellapy_pw;
	{load("%paellapy_pa", "left")}
	atom.relaxed.gpu.global.add.u32 %paellapy_pu, [%paellapy_pa], 1;
	mad.wide.u32 %paellapy_pa, %paellapy_pu, 4, %paellapy_pa;
	st.global.u32 [%paellapy_pa+{LEFT_HEAD_BYTES}], %paellapy_pt;
$paellapy_noted:
	ret;
$paellapy_run:""")


def insert_flag_load(entry: Function, load: Load, thread_index_bits: str) -> None:
    """Reads a copy of the flag before anything else. All threads but the first use 0, below every launch's number."""
    entry.insert_prologue(f"""
	.reg .b32 %paellapy_pt, %paellapy_pu, %paellapy_pw, %paellapy_pe;
	.reg .b64 %paellapy_pa;
	.reg .pred %paellapy_pp;
	{thread_index_bits}
	setp.eq.u32 %paellapy_pp, %paellapy_pt, 0;
	mov.u32 %paellapy_pw, 0;
	{load("%paellapy_pa", "flag")}
	mov.u32 %paellapy_pu, %ctaid.x;
	mov.u32 %paellapy_pt, %ctaid.y;
	add.u32 %paellapy_pu, %paellapy_pu, %paellapy_pt;
	and.b32 %paellapy_pu, %paellapy_pu, {FLAG_COPIES - 1};
	mad.wide.u32 %paellapy_pa, %paellapy_pu, {FLAG_COPY_BYTES}, %paellapy_pa;
	@%paellapy_pp ld.relaxed.sys.global.u32 %paellapy_pw, [%paellapy_pa];""")


def _after_first_loads(entry: Function) -> int:
    """The place of the decision: after the loads that need no other load's result, before any effect."""
    assert entry.body is not None
    names = Names.of(entry)
    jumped_to = {t.text for s in entry.body if s.kind is not Kind.LABEL for t in s.tokens}
    best = at = next(i for i, s in enumerate(entry.body) if i and s.kind is not Kind.DIRECTIVE)
    depth = 0
    loaded: set[str] = set()
    for i, s in enumerate(entry.body[at:], at):
        depth += (s.kind is Kind.OPEN) - (s.kind is Kind.CLOSE)
        if depth < 0 or (s.kind is Kind.LABEL and s.label in jumped_to):
            break
        if s.kind is not Kind.INSTRUCTION:
            continue
        if not (s.is_op(*COMPUTES) or _only_reads(s)) or _uses(s, loaded, names):
            break
        if s.is_op("ld") and ".global" in s.opcode:
            loaded |= written(s, names)
            if depth == 0:
                best = i + 1
    return best


def _only_reads(s: Statement) -> bool:
    strong = {"volatile", "relaxed", "acquire", "mmio", "cv"} & set(s.opcode.split("."))
    return s.is_op("ld", "ldu") and not strong


def _uses(s: Statement, registers: set[str], names: Names) -> bool:
    """Whether an instruction reads one of these registers, or writes a register that a pending load will write."""
    return s.guard in registers or any(names.register(text) in registers for text in s.operands())
