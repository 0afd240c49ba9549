"""The `report` pass: when a block starts and ends, and on which SM; counted, or recorded for a trace.

The design of the reports follows measurements on an H200 (see docs/architecture.md):
* Counters and rings are per SM. One word shared by all blocks costs 30–96 % on short blocks.
* A trace record's slot is reserved by an atomic when the block starts, but the result is first needed when the block
  ends, so the round trip to L2 is hidden behind the kernel's own work.
* Only thread 0 reports, behind a branch: on a kernel of 2.5 µs, reading special registers in every warp costs more than
  the branch. Other threads run the kernel's own instructions plus one predicate.
"""

from __future__ import annotations

from collections.abc import Sequence

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.descriptor import DescriptorParam, Exits, PassConfig, thread_index_bits
from paellapy.instrument.ptx.flow import UNIFORM_SPECIAL, FlowGraph, Names, is_special, written
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, Token
from paellapy.instrument.ptx.ranges import RangePass
from paellapy.instrument.records import RING_RECORD, SM_LINE, WARP_SHIFT, field_offset

# Decides how to detect the end of a block: by a barrier at the exit, or by counting its threads out.
#
# A barrier is cheap. But a thread that leaves early, and waits there while others still wait at a barrier of the body,
# deadlocks or satisfies the body's barrier in their place. The exit barrier is safe if the body has no barrier, or if
# no branch that threads of a block may take differently leads around one. This is decided from the code: registers
# derived from the thread's index (or from memory) make a branch divergent, and a divergent branch is harmful if a
# barrier can be reached before its two paths meet again.


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


_SPARE_BARRIER = 15
_STATIC_SHARED_LIMIT = 48 * 1024
_STARTED, _ENDED, _TAIL = (field_offset(SM_LINE, n) for n in ("started", "ended", "tail"))


class ReportPass:
    """One entry that is made to report the start and the end of its blocks."""

    def __init__(
        self,
        module: Module,
        entry: Function,
        config: PassConfig,
        descriptor: DescriptorParam,
        threads: Sequence[int] | None,
        ranges: RangePass | None,
    ) -> None:
        self.module, self.entry, self.config = module, entry, config
        self._descriptor, self.threads, self.ranges = descriptor, threads, ranges

    def report_start_and_end(self, *, trace: bool) -> None:
        exits = self._choose_exits()
        places = self.ranges.prologue() if self.ranges else ""
        self._redirect_exits()
        self.entry.insert_after_first_loads(f"""
	@%paellapy_other bra $paellapy_started;{self._descriptor.guard("$paellapy_started")}
	{self._reserve_slot() if trace else self._count_start()}
$paellapy_started:""")
        self.entry.insert_prologue(f"""
	.reg .b32 %paellapy_t, %paellapy_u, %paellapy_v, %paellapy_sm, %paellapy_start, %paellapy_slot;
	.reg .b64 %paellapy_a, %paellapy_w, %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_other, %paellapy_foreign, %paellapy_flat;
	{thread_index_bits(self.threads)}
	setp.ne.u32 %paellapy_other, %paellapy_t, 0;{places}{self._count_out_begin() if exits == "count-out" else ""}""")
        self.entry.insert_epilogue(self._epilogue(exits, trace))

    def _choose_exits(self) -> Exits:
        chosen = self.config.exits
        if chosen == "auto":
            chosen = "barrier" if barrier_at_exit_is_safe(self.module, self.entry) else "count-out"
        if chosen == "spare-barrier":
            self._check_spare_barrier()
        if chosen == "count-out":
            self._check_count_out()
        return chosen

    def _check_spare_barrier(self) -> None:
        """Checks a warp-specialised kernel: groups of warps leave at different times and meet at barriers with explicit
        thread counts, so no thread of the body waits for one that already waits at the exit.
        """
        for s in self.entry.instructions():
            if s.is_op(*BARRIER_OPS) and ".cluster" not in s.opcode and ".warp" not in s.opcode:
                operands = [t for t in s.operands() if t != ","]
                if operands and operands[0] == str(_SPARE_BARRIER):
                    raise InstrumentError(
                        f"kernel {self.entry.name!r} cannot be instrumented: it uses barrier {_SPARE_BARRIER} itself, "
                        "which the instrumentation needs"
                    )

    def _check_count_out(self) -> None:
        used = 0
        for s in self.entry.body or ():
            if s.kind is Kind.DIRECTIVE and s.opcode == ".shared":
                used += _declared_bytes(s.tokens)
        for item in self.module.items:  # variables that device functions use too
            if isinstance(item, list) and item[0].text != ".extern" and ".shared" in (t.text for t in item[:2]):
                used += _declared_bytes(item)
        if used + 12 > _STATIC_SHARED_LIMIT:
            raise InstrumentError(
                f"kernel {self.entry.name!r} cannot be instrumented: its threads leave at different times, and "
                f"counting them needs 12 bytes of shared memory, but it already declares {used} of "
                f"{_STATIC_SHARED_LIMIT} bytes. Use dynamic shared memory instead, or return from one place."
            )

    def _redirect_exits(self) -> None:
        """Redirects every exit of the body through one label."""
        for s in self.entry.instructions():
            if s.is_op("ret", "exit"):
                guard = s.tokens[: s.first_operand - 1]
                opcode = s.tokens[s.first_operand - 1]
                s.tokens = [*guard, Token(opcode.trivia, "bra"), Token(" ", "$paellapy_exit"), Token("", ";")]
                s.opcode = "bra"

    def _count_start(self) -> str:
        return f"""mov.u32 %paellapy_sm, %smid;
	{self._weight()}
	{self._line_address()}
	red.relaxed.gpu.global.add.u64 [%paellapy_a+{_STARTED}], %paellapy_w;"""

    def _reserve_slot(self) -> str:
        # The atomic's result is not used before the end of the block, so its latency is hidden behind the kernel's own
        # work.
        return f"""mov.u32 %paellapy_sm, %smid;
	{self._line_address()}
	atom.relaxed.gpu.global.add.u32 %paellapy_slot, [%paellapy_a+{_TAIL}], 1;
	mov.u32 %paellapy_start, %globaltimer_lo;{self.ranges.at_start() if self.ranges else ""}"""

    def _prepare_count(self) -> str:
        return f"""{self._weight()}
	{self._line_address()}"""

    def _prepare_record(self) -> str:
        """%paellapy_a = the record's place in this SM's ring, %paellapy_t = block, %paellapy_v = launch."""
        return f"""{self._descriptor.load("%paellapy_v", "ring_mask")}
	and.b32 %paellapy_slot, %paellapy_slot, %paellapy_v;
	add.u32 %paellapy_v, %paellapy_v, 1;
	mad.lo.u32 %paellapy_slot, %paellapy_sm, %paellapy_v, %paellapy_slot;
	{self._descriptor.load("%paellapy_a", "rings")}
	mad.wide.u32 %paellapy_a, %paellapy_slot, {RING_RECORD.itemsize}, %paellapy_a;
	{self._linear_block()}
	{self._descriptor.load("%paellapy_v", "launch")}"""

    @staticmethod
    def _write_end(trace: bool) -> str:
        if not trace:
            return f"red.relaxed.gpu.global.add.u64 [%paellapy_a+{_ENDED}], %paellapy_w;"
        return """mov.u32 %paellapy_u, %globaltimer_lo;
	st.global.v4.u32 [%paellapy_a], {%paellapy_start, %paellapy_u, %paellapy_t, %paellapy_v};"""

    @staticmethod
    def _linear_block() -> str:
        """%paellapy_t = this block's number in its grid, x fastest.

        Grid sizes are in constant memory, block indices in slow special registers: for a flat grid, the usual case,
        only the register is read that the kernel has already read.
        """
        return """mov.u32 %paellapy_t, %ctaid.x;
	mov.u32 %paellapy_u, %nctaid.y;
	mov.u32 %paellapy_v, %nctaid.z;
	mul.lo.u32 %paellapy_v, %paellapy_v, %paellapy_u;
	setp.eq.u32 %paellapy_flat, %paellapy_v, 1;
	@%paellapy_flat bra $paellapy_numbered;
	mov.u32 %paellapy_v, %ctaid.z;
	mul.lo.u32 %paellapy_v, %paellapy_v, %paellapy_u;
	mov.u32 %paellapy_u, %ctaid.y;
	add.u32 %paellapy_v, %paellapy_v, %paellapy_u;
	mov.u32 %paellapy_u, %nctaid.x;
	mad.lo.u32 %paellapy_t, %paellapy_v, %paellapy_u, %paellapy_t;
$paellapy_numbered:"""

    def _epilogue(self, exits: Exits, trace: bool) -> str:
        prepare = self._prepare_record() if trace else self._prepare_count()
        write = self._write_end(trace)
        leave = self.ranges.at_exit() if self.ranges else ""
        if self.ranges:
            write = f"{self.ranges.at_end()}\n\t{write}"
        if exits == "count-out":
            fetch = "mov.u32 %paellapy_sm, %smid;"
            if trace:  # the last thread to leave is rarely thread 0: slot and start time wait in shared memory
                fetch += """
	ld.shared.u32 %paellapy_slot, [paellapy_out+4];
	ld.shared.u32 %paellapy_start, [paellapy_out+8];"""
            return f"""
$paellapy_exit:{leave}{self._count_out_end(trace)}
	{fetch}
	{prepare}
	{write}
$paellapy_done:
	ret;
"""
        foreign = "" if self.config.pointer_param is None else "\n\t@%paellapy_foreign bra $paellapy_wait;"
        barrier = f"barrier.sync {_SPARE_BARRIER if exits == 'spare-barrier' else 0};"
        before = ""
        if not trace:
            # A counter's address is computed before the barrier, while thread 0 waits for the slowest warp anyway. A
            # record's address is not: it takes registers that the kernel's last instructions need (40 became 48 in a
            # layer norm).
            before = f"""
	@%paellapy_other bra $paellapy_wait;{foreign}
	{prepare}
$paellapy_wait:"""
            prepare = ""
        return f"""
$paellapy_exit:{leave}{before}
	{barrier}
	@%paellapy_other bra $paellapy_done;{foreign.replace("wait", "done")}
	{prepare}
	{write}
$paellapy_done:
	ret;
"""

    def _count_out_begin(self) -> str:
        return """
	.shared .align 4 .b8 paellapy_out[12];
	@!%paellapy_other st.shared.u32 [paellapy_out], 0;
	bar.sync 0;"""

    def _count_out_end(self, trace: bool) -> str:
        # Lanes that leave together are counted by the lowest of them. Thread 0 stores its values before it counts.
        leave = ""
        if trace:
            leave = """
	@%paellapy_other bra $paellapy_leaving;
	st.shared.u32 [paellapy_out+4], %paellapy_slot;
	st.shared.u32 [paellapy_out+8], %paellapy_start;
	fence.acq_rel.cta;
$paellapy_leaving:"""
        return f"""{leave}
	activemask.b32 %paellapy_t;
	mov.u32 %paellapy_u, %lanemask_lt;
	and.b32 %paellapy_u, %paellapy_u, %paellapy_t;
	setp.ne.u32 %paellapy_other, %paellapy_u, 0;
	@%paellapy_other bra $paellapy_done;
	popc.b32 %paellapy_t, %paellapy_t;
	atom.acq_rel.cta.shared.add.u32 %paellapy_u, [paellapy_out], %paellapy_t;
	add.u32 %paellapy_t, %paellapy_t, %paellapy_u;
	mov.u32 %paellapy_u, %ntid.x;
	mov.u32 %paellapy_v, %ntid.y;
	mul.lo.u32 %paellapy_u, %paellapy_u, %paellapy_v;
	mov.u32 %paellapy_v, %ntid.z;
	mul.lo.u32 %paellapy_u, %paellapy_u, %paellapy_v;
	setp.ne.u32 %paellapy_other, %paellapy_t, %paellapy_u;
	@%paellapy_other bra $paellapy_done;"""

    def _weight(self) -> str:
        """%paellapy_w = the blocks and warps that one block adds to its SM's counter."""
        if self.threads:
            warps = -(-self.threads[0] * self.threads[1] * self.threads[2] // 32)
            return f"mov.b64 %paellapy_w, {warps << WARP_SHIFT | 1};"
        return """mov.u32 %paellapy_t, %ntid.x;
	mov.u32 %paellapy_u, %ntid.y;
	mul.lo.u32 %paellapy_t, %paellapy_t, %paellapy_u;
	mov.u32 %paellapy_u, %ntid.z;
	mad.lo.u32 %paellapy_t, %paellapy_t, %paellapy_u, 31;
	shr.u32 %paellapy_t, %paellapy_t, 5;
	mov.u32 %paellapy_u, 1;
	mov.b64 %paellapy_w, {%paellapy_u, %paellapy_t};"""

    def _line_address(self) -> str:
        """%paellapy_a = the line of counters of SM %paellapy_sm."""
        return f"""{self._descriptor.load("%paellapy_a", "lines")}
	mad.wide.u32 %paellapy_a, %paellapy_sm, {SM_LINE.itemsize}, %paellapy_a;"""


def _declared_bytes(tokens: list[Token]) -> int:
    """Bytes declared by a `.shared .align 4 .b8 name[512];` statement."""
    texts = [t.text for t in tokens]
    size = next((int(t[2:]) // 8 for t in texts if t[:2] in (".b", ".u", ".s", ".f") and t[2:].isdigit()), 1)
    count = 1
    for i, text in enumerate(texts):
        if text == "[" and texts[i + 1].isdigit():
            count *= int(texts[i + 1])
    return size * count


# The `notify` report: the last block of a launch tells the host that it has started.


def notify_entry(
    entry: Function, config: PassConfig, descriptor: DescriptorParam, threads: Sequence[int] | None
) -> None:
    """Makes the last block of a launch report that it has started."""
    axes = "x" if config.sliced else "xyz"
    tests = ""
    for axis in axes:
        tests += f"""
	mov.u32 %paellapy_nt, %ctaid.{axis};
	mov.u32 %paellapy_nu, %nctaid.{axis};
	add.u32 %paellapy_nt, %paellapy_nt, 1;
	setp.ne.u32 %paellapy_np, %paellapy_nt, %paellapy_nu;
	@%paellapy_np bra $paellapy_notified;"""
    index = thread_index_bits(threads, "%paellapy_nt", "%paellapy_nu")
    shared = ""  # the report of start and end declares these registers if there is one
    if config.report not in ("count", "trace"):
        shared = """
	.reg .b64 %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_foreign;"""
    entry.insert_prologue(f"""
	.reg .b32 %paellapy_nt, %paellapy_nu;
	.reg .b64 %paellapy_na, %paellapy_nw;
	.reg .pred %paellapy_np;{shared}{tests}
	{index}
	setp.ne.u32 %paellapy_np, %paellapy_nt, 0;
	@%paellapy_np bra $paellapy_notified;{descriptor.guard("$paellapy_notified")}
	{descriptor.load("%paellapy_na", "notify")}
	mov.u64 %paellapy_nw, %globaltimer;
	st.relaxed.sys.global.u64 [%paellapy_na], %paellapy_nw;
$paellapy_notified:""")
