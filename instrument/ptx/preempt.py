"""The `preempt` pass: a block that starts while its launch's flag is set does not run; it records its number and exits.

One thread of the block reads the flag, and a barrier with a reduction tells all others: every block decides as one,
without shared memory. The read comes with the kernel's first read and the decision later, so that the round trip to L2
is hidden behind the kernel's own. The decision is joined to the first barrier of the kernel, if all threads pass it
before the block has any effect; otherwise it has a barrier of its own, after the reads with which the kernel begins
(`Opening`).

A flag is a number. A launch also has a number (`epoch`), and is preempted unless the flag is below it. So a launch that
is made later is not affected by a flag that was set before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.descriptor import Load, linear_index, thread_index_bits
from paellapy.instrument.ptx.flow import COMPUTES, Names, blocks_that_wait, written
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, statements
from paellapy.instrument.records import FLAG_COPIES, FLAG_COPY_BYTES, LEFT_HEAD_BYTES

# --- the `slice` pass: a launch runs part of a logical grid, and every block sees its place in the whole grid ---------

_SLICED = {f"%ctaid.{a}": f"%paellapy_c{a}" for a in "xyz"} | {f"%nctaid.{a}": f"%paellapy_g{a}" for a in "xyz"}
_GRID = ("%ctaid", "%nctaid")


def slice_entry(module: Module, entry: Function, load: Load, listed: bool = False) -> None:
    """The launch is a 1-D grid of n blocks; block i takes the place of block `first + i` of the logical grid.

    `listed`: or of the i-th block in the descriptor's list, if there is one.
    """
    for function in module.functions():
        if not function.is_entry and any(_reads_grid(s) for s in function.instructions()):
            raise InstrumentError(
                f"kernel {entry.name!r} cannot be sliced: its device function {function.name!r} reads "
                "blockIdx or gridDim itself. Pass them as arguments, or let the function be inlined.",
                kernel=entry.name, field="slice", given=function.name,
            )
    if _has_clusters(entry):
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be sliced: the blocks of a cluster must be launched together. Launch it "
            "without clusters, or unsliced.", kernel=entry.name, field="slice", given="cluster"
        )
    used: set[str] = set()
    for s in entry.instructions():
        for token in s.tokens[s.first_operand :]:
            if token.text.startswith(("%clusterid", "%nclusterid")):
                raise InstrumentError(
                    f"kernel {entry.name!r} cannot be sliced: it reads numbers of clusters. Launch it unsliced.",
                    kernel=entry.name, field="slice", given="%clusterid",
                )
            if token.text in _SLICED:
                used.add(token.text)
                token.text = _SLICED[token.text]
            elif token.text.startswith(_GRID):
                raise InstrumentError(
                    f"kernel {entry.name!r} cannot be sliced: it reads {token.text} as a whole vector. "
                    "Read its components one by one.", kernel=entry.name, field="slice", given=token.text
                )
    if not used:
        return
    entry.insert_prologue(_prologue(used, load, listed))


def _prologue(used: set[str], load: Load, listed: bool) -> str:
    code = """
	.reg .b32 %paellapy_cx, %paellapy_cy, %paellapy_cz, %paellapy_gx, %paellapy_gy, %paellapy_gz, %paellapy_st;
	.reg .pred %paellapy_row;"""
    for axis in "xyz":
        code += f"\n\t{load(f'%paellapy_g{axis}', f'grid_{axis}')}"
    if not used & {"%ctaid.x", "%ctaid.y", "%ctaid.z"}:
        return code
    # A flat grid (the usual case) needs no division; the branch is the same for all threads.
    return f"""{code}
	{load("%paellapy_st", "first")}
	mov.u32 %paellapy_cx, %ctaid.x;{_from_list(load) if listed else ""}
	add.u32 %paellapy_cx, %paellapy_cx, %paellapy_st;
	mov.u32 %paellapy_cy, 0;
	mov.u32 %paellapy_cz, 0;
	setp.lt.u32 %paellapy_row, %paellapy_cx, %paellapy_gx;
	@%paellapy_row bra $paellapy_placed;
	div.u32 %paellapy_cy, %paellapy_cx, %paellapy_gx;
	mul.lo.u32 %paellapy_st, %paellapy_cy, %paellapy_gx;
	sub.u32 %paellapy_cx, %paellapy_cx, %paellapy_st;
	div.u32 %paellapy_cz, %paellapy_cy, %paellapy_gy;
	mul.lo.u32 %paellapy_st, %paellapy_cz, %paellapy_gy;
	sub.u32 %paellapy_cy, %paellapy_cy, %paellapy_st;
$paellapy_placed:"""


def _from_list(load: Load) -> str:
    """Takes the block's number from the list, if there is one; `first` is then 0."""
    return f"""
	.reg .b64 %paellapy_sl;
	{load("%paellapy_sl", "todo")}
	setp.eq.u64 %paellapy_row, %paellapy_sl, 0;
	@%paellapy_row bra $paellapy_in_order;
	mad.wide.u32 %paellapy_sl, %paellapy_cx, 4, %paellapy_sl;
	ld.global.nc.u32 %paellapy_cx, [%paellapy_sl];
$paellapy_in_order:"""


def _has_clusters(entry: Function) -> bool:
    """Whether blocks run in clusters, or the launch may decide so."""
    cluster = entry.directive(".reqnctapercluster")
    return max(cluster) > 1 if cluster else entry.directive(".explicitcluster") is not None


def _reads_grid(s: Statement) -> bool:
    return any(t.text.startswith(_GRID) for t in s.tokens)



# Instructions that compute, or exchange values within a block: no other block can see them.
_WITHIN_BLOCK = (
    *COMPUTES, "activemask", "bfind", "copysign", "cos", "createpolicy", "dp2a", "dp4a", "elect", "ldmatrix", "match",
    "mma", "movmatrix", "redux", "shfl", "sin", "stmatrix", "vote",
)  # fmt: skip
_READS = ("ld", "ldu", "ldmatrix")
_ACCESSES = (*_READS, "st", "stmatrix", "cp")
_EXCHANGES = ("bar", "elect", "match", "redux", "shfl", "vote")  # the last operand says which threads take part
_OWN_SHARED = {"shared", "shared::cta"}
_WHOLE_BLOCK_BARRIERS = ("bar.sync", "bar.cta.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned")
# The memory that a copy writes to belongs to the next block once this one has left.
_AWAIT_COPIES = """
	cp.async.wait_all;"""
_WARP = 32
_MOST_INSTRUCTIONS = 1000  # before the decision; a block that does not run must leave soon


def preempt_entry(module: Module, entry: Function, load: Load, threads: Sequence[int] | None, sliced: bool) -> None:
    """Lets blocks leave when they start; `sliced`: of a slice, or of a list of blocks."""
    _refuse_unpreemptible(module, entry)
    flat = sliced or not any(t.text == "%ctaid.y" for s in entry.instructions() for t in s.tokens)
    opening = Opening(entry)
    _insert_decision(entry, opening, load, threads is not None and math.prod(threads) == _WARP)
    if sliced:  # also renumbers the block that is recorded
        slice_entry(module, entry, load, listed=True)
    _insert_flag_load(entry, opening.first_read, load, threads, flat)


def _refuse_unpreemptible(module: Module, entry: Function) -> None:
    """Raises for kernels whose blocks cannot run without each other."""
    if _has_clusters(entry):
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be preempted: the blocks of a cluster must run together, but would be "
            "preempted one by one. Launch it without clusters.", kernel=entry.name, field="preempt", given="cluster"
        )
    if waited_at := blocks_that_wait(module, entry):
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be preempted: its blocks wait for each other in a loop around "
            f"`{waited_at}`, and would wait for ever for a block that does not run. Launch it without `preemptible`.",
            kernel=entry.name, field="preempt", given=str(waited_at),
        )


class Opening:
    """The straight line of code with which a kernel begins, as far as it has no effect outside the block.

    All threads run it from start to end. Reads and shared memory are no effects: a block may leave after them. But an
    address, a mask or a condition that was read may be garbage, because the launch that writes it may be preempted too:
    the line ends before an access or an exchange that depends on one.
    """

    def __init__(self, entry: Function) -> None:
        assert entry.body is not None
        self._names = Names.of(entry)
        self._jumped_to = {t.text for s in entry.body if s.kind is not Kind.LABEL for t in s.tokens}
        self.start = next(i for i, s in enumerate(entry.body) if i and s.kind is not Kind.DIRECTIVE)
        self.last_read = self.barrier = -1  # places in the body; -1: there is none
        self.first_read: Statement | None = None
        self.walk(entry.body)
        self.place = self.barrier if self.barrier >= 0 else max(self.start, self.last_read + 1)
        self.copies = any(s.is_op("cp") for s in entry.body[: self.place])

    def walk(self, body: list[Statement]) -> None:
        """Finds the last read and the barrier."""
        from_memory: set[str] = set()  # registers that wait for a read
        depth = count = 0
        for i, s in enumerate(body[self.start :], self.start):
            depth += (s.kind is Kind.OPEN) - (s.kind is Kind.CLOSE)
            if depth < 0 or (s.kind is Kind.LABEL and s.label in self._jumped_to):
                return
            if s.kind is not Kind.INSTRUCTION:
                continue
            count += 1
            if count > _MOST_INSTRUCTIONS or not (_is_whole_barrier(s) or _without_effect(s)):
                return
            if self._trusts(s, from_memory):
                return
            if depth == 0 and _is_whole_barrier(s):
                self.barrier = i
                if self.last_read >= 0:
                    return
            elif depth == 0 and _reads_global(s) and not self._uses(s, from_memory):
                self.first_read = self.first_read or s
                self.last_read = i
                self.barrier = -1  # an earlier barrier would not wait long enough
            if _reads_memory(s) or (self._uses(s, from_memory) and not s.is_op("st", "stmatrix", "cp")):
                from_memory |= written(s, self._names)

    def _trusts(self, s: Statement, registers: set[str]) -> bool:
        """Whether a wrong value in one of these registers could be an error, or keep threads waiting."""
        operands = s.operands()
        if s.is_op(*_EXCHANGES):
            operands = operands[-1:]
        elif s.is_op(*_ACCESSES) and not s.is_op("cp"):
            operands = operands[operands.index("[") : operands.index("]")]
        elif not s.is_op("barrier", "cp"):
            return s.is_op("mma", "movmatrix") and s.guard in registers
        return s.guard in registers or any(self._names.register(text) in registers for text in operands)

    def _uses(self, s: Statement, registers: set[str]) -> bool:
        """Whether an instruction reads one of these registers, or writes a register that a pending read will write."""
        return s.guard in registers or any(self._names.register(text) in registers for text in s.operands())


def _without_effect(s: Statement) -> bool:
    """Whether nothing outside the block can tell that an instruction ran."""
    parts = s.opcode.split(".")
    if s.is_op("ld", "ldu"):
        return not {"volatile", "relaxed", "acquire", "mmio", "cv"} & set(parts)
    if s.is_op("st"):
        return bool(_OWN_SHARED & set(parts))
    if s.is_op("cp"):
        return parts[1] == "async" and not {"bulk", "mbarrier"} & set(parts)
    return s.is_op(*_WITHIN_BLOCK) or s.opcode == "bar.warp.sync"


def _reads_memory(s: Statement) -> bool:
    return s.is_op(*_READS) and not s.opcode.startswith(("ld.param", "ld.const"))


def _reads_global(s: Statement) -> bool:
    return s.is_op("ld", "cp") and "global" in s.opcode.split(".")


def _is_whole_barrier(s: Statement) -> bool:
    """Whether all threads of the block wait at an instruction."""
    return s.opcode in _WHOLE_BLOCK_BARRIERS and not s.guard and len(s.operands()) == 1


def _insert_decision(entry: Function, opening: Opening, load: Load, one_warp: bool) -> None:
    assert entry.body is not None
    barrier = entry.body[opening.barrier].operands()[0] if opening.barrier >= 0 else "0"
    agree = f"bar.red.or.pred %paellapy_pp, {barrier}, %paellapy_pp;"
    if one_warp and opening.barrier < 0:
        agree = "vote.sync.any.pred %paellapy_pp, %paellapy_pp, 0xffffffff;"
    decision = f"""
	{load("%paellapy_pe", "epoch")}
	setp.ge.u32 %paellapy_pp, %paellapy_pw, %paellapy_pe;
	{agree}
	@%paellapy_pp bra.uni $paellapy_leave;"""
    # Blocks that leave are rare: their code is behind the kernel's own, and costs the others neither jump nor fetch.
    entry.insert_epilogue(f"""
	ret;
$paellapy_leave:{_AWAIT_COPIES if opening.copies else ""}
	{load("%paellapy_pe", "epoch")}
	setp.lt.u32 %paellapy_pp, %paellapy_pw, %paellapy_pe;
	@%paellapy_pp bra $paellapy_noted;
	{linear_index("%paellapy_pt", "%paellapy_pu", "%paellapy_pw")}
	{load("%paellapy_pa", "left")}
	atom.relaxed.gpu.global.add.u32 %paellapy_pu, [%paellapy_pa], 1;
	mad.wide.u32 %paellapy_pa, %paellapy_pu, 4, %paellapy_pa;
	st.global.u32 [%paellapy_pa+{LEFT_HEAD_BYTES}], %paellapy_pt;
$paellapy_noted:
	ret;
""")
    place = opening.place
    entry.body[place : place + (opening.barrier >= 0)] = statements(decision)


def _insert_flag_load(
    entry: Function, first_read: Statement | None, load: Load, threads: Sequence[int] | None, flat: bool
) -> None:
    """Reads a copy of the flag just before the kernel's first read; before anything else, if the kernel does not begin
    with a read whose address is in a register. All threads but the first use 0, below every launch's number.

    `ptxas` would move the read to the very start, and load the kernel's pointers only behind it. That delays the
    kernel's own reads by the latency of constant memory: 1.4 % of an addition of 2.5 µs. So the read pretends to depend
    on the address of the kernel's first read: the address is compared with one that nothing can have. (Null it may be,
    where a mask forbids the read.)
    """
    assert entry.body is not None
    place = "mov.u32 %paellapy_pu, %ctaid.x;"
    if not flat:  # special registers are slow: a second one is read only if the kernel does so too
        place += """
	mov.u32 %paellapy_pt, %ctaid.y;
	add.u32 %paellapy_pu, %paellapy_pu, %paellapy_pt;"""
    registers = """
	.reg .b32 %paellapy_pt, %paellapy_pu, %paellapy_pw, %paellapy_pe;
	.reg .b64 %paellapy_pa;
	.reg .pred %paellapy_pp;"""
    address = _address_of(first_read)
    mine = "setp.eq.u32 %paellapy_pp, %paellapy_pt, 0;"
    if address:
        mine += f"\n\tsetp.ne.and.s64 %paellapy_pp, {address}, -1, %paellapy_pp;"
    read = f"""
	{thread_index_bits(threads, "%paellapy_pt", "%paellapy_pu")}
	{mine}
	mov.u32 %paellapy_pw, 0;
	{load("%paellapy_pa", "flag")}
	{place}
	and.b32 %paellapy_pu, %paellapy_pu, {FLAG_COPIES - 1};
	mad.wide.u32 %paellapy_pa, %paellapy_pu, {FLAG_COPY_BYTES}, %paellapy_pa;
	@%paellapy_pp ld.relaxed.sys.global.u32 %paellapy_pw, [%paellapy_pa];"""
    if address:
        at = next(i for i, s in enumerate(entry.body) if s is first_read)
        entry.body[at:at] = statements(read)
        read = ""
    entry.insert_prologue(registers + read)


def _address_of(read: Statement | None) -> str:
    """The register with the address that an instruction reads in global memory; empty if that is not known."""
    if read is None:
        return ""
    operands = read.operands()
    brackets = [k for k, text in enumerate(operands) if text == "["]
    from_global = brackets[1:] if read.is_op("cp") else brackets  # a copy names its target in shared memory first
    found = operands[from_global[0] + 1] if from_global else ""
    return found if found.startswith("%") else ""
