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
from paellapy.instrument.ptx.descriptor import DescriptorParam, Exits, PassConfig, count_warps, thread_index_bits
from paellapy.instrument.ptx.flow import UNIFORM_SPECIAL, FlowGraph, Names, is_special, written
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, Token
from paellapy.instrument.ptx.ranges import RangePass
from paellapy.instrument.records import RING_RECORD, SM_LINE, WARP_SHIFT, field_offset

# --- how the end of a block is detected: by a barrier at the exit, or by counting its threads out ---------------------
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
                "(__forceinline__).", kernel=kernel, field="exit", given=function.name
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


# --- the report of start and end --------------------------------------------------------------------------------------

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
	.reg .b32 %paellapy_thread, %paellapy_scratch, %paellapy_sm, %paellapy_start, %paellapy_end, %paellapy_slot;
	.reg .b32 %paellapy_mask, %paellapy_block, %paellapy_extent, %paellapy_launch, %paellapy_threads, %paellapy_gone;
	.reg .b64 %paellapy_line, %paellapy_weight, %paellapy_record, %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_other, %paellapy_foreign, %paellapy_flat;
	{thread_index_bits(self.threads, "%paellapy_thread", "%paellapy_scratch")}
	setp.ne.u32 %paellapy_other, %paellapy_thread, 0;{places}{_COUNT_OUT_BEGIN if exits == "count-out" else ""}""")
        if exits == "count-out":
            code = self._exit_of_last_thread(trace)
        else:
            barrier = f"barrier.sync {_SPARE_BARRIER if exits == 'spare-barrier' else 0};"
            code = self._record_after(barrier) if trace else self._count_after(barrier)
        self.entry.insert_epilogue(code)

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
                        "which the instrumentation needs", kernel=self.entry.name, field="barrier", given=_SPARE_BARRIER
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
                f"{_STATIC_SHARED_LIMIT} bytes. Use dynamic shared memory instead, or return from one place.",
                kernel=self.entry.name, field="shared memory", given=used, limit=_STATIC_SHARED_LIMIT,
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
	{self._counter()}
	red.relaxed.gpu.global.add.u64 [%paellapy_line+{_STARTED}], %paellapy_weight;"""

    def _reserve_slot(self) -> str:
        # The atomic's result is not used before the end of the block, so its latency is hidden behind the kernel's own
        # work.
        return f"""mov.u32 %paellapy_sm, %smid;
	{self._line_address()}
	atom.relaxed.gpu.global.add.u32 %paellapy_slot, [%paellapy_line+{_TAIL}], 1;
	mov.u32 %paellapy_start, %globaltimer_lo;{self.ranges.at_start() if self.ranges else ""}"""

    # -- the end of a block: when a barrier at the exit has been passed, or by the last thread that leaves

    def _count_after(self, barrier: str) -> str:
        # A counter's address is computed before the barrier, while thread 0 waits for the slowest warp anyway.
        return f"""
$paellapy_exit:{self._leave()}
	@%paellapy_other bra $paellapy_wait;{self._if_foreign("$paellapy_wait")}
	{self._counter()}
$paellapy_wait:
	{barrier}
	@%paellapy_other bra $paellapy_done;{self._if_foreign("$paellapy_done")}
	{self._write_count()}
$paellapy_done:
	ret;
"""

    def _record_after(self, barrier: str) -> str:
        # A record's address is computed after the barrier: before, it takes registers that the kernel's last
        # instructions need (40 became 48 in a layer norm).
        return f"""
$paellapy_exit:{self._leave()}
	{barrier}
	@%paellapy_other bra $paellapy_done;{self._if_foreign("$paellapy_done")}
	{self._write_record()}
$paellapy_done:
	ret;
"""

    def _exit_of_last_thread(self, trace: bool) -> str:
        # The last thread to leave is rarely thread 0: its slot and start time wait in shared memory.
        keep, fetch = (_KEEP_SLOT, _FETCH_SLOT) if trace else ("", "")
        report = self._write_record() if trace else f"{self._counter()}\n\t{self._write_count()}"
        return f"""
$paellapy_exit:{self._leave()}{keep}{_COUNT_OUT}
	mov.u32 %paellapy_sm, %smid;{fetch}
	{report}
$paellapy_done:
	ret;
"""

    def _leave(self) -> str:
        return self.ranges.at_exit() if self.ranges else ""

    def _if_foreign(self, skip: str) -> str:
        """Skips the report of a launch that was not made for one."""
        return "" if self.config.pointer_param is None else f"\n\t@%paellapy_foreign bra {skip};"

    def _write_count(self) -> str:
        return f"{self._before_write()}red.relaxed.gpu.global.add.u64 [%paellapy_line+{_ENDED}], %paellapy_weight;"

    def _write_record(self) -> str:
        """Writes the record to its place in this SM's ring."""
        return f"""{self._descriptor.load("%paellapy_mask", "ring_mask")}
	and.b32 %paellapy_slot, %paellapy_slot, %paellapy_mask;
	add.u32 %paellapy_extent, %paellapy_mask, 1;
	mad.lo.u32 %paellapy_slot, %paellapy_sm, %paellapy_extent, %paellapy_slot;
	{self._descriptor.load("%paellapy_record", "rings")}
	mad.wide.u32 %paellapy_record, %paellapy_slot, {RING_RECORD.itemsize}, %paellapy_record;
	{_BLOCK_NUMBER}
	{self._descriptor.load("%paellapy_launch", "launch")}
	{self._before_write()}mov.u32 %paellapy_end, %globaltimer_lo;
	st.global.v4.u32 [%paellapy_record], {{%paellapy_start, %paellapy_end, %paellapy_block, %paellapy_launch}};"""

    def _before_write(self) -> str:
        return f"{self.ranges.at_end()}\n\t" if self.ranges else ""

    def _counter(self) -> str:
        """%paellapy_weight = the blocks and warps that one block adds to the counters in %paellapy_line."""
        if self.threads:
            warps = -(-self.threads[0] * self.threads[1] * self.threads[2] // 32)
            weight = f"mov.b64 %paellapy_weight, {warps << WARP_SHIFT | 1};"
        else:
            weight = f"""{count_warps("%paellapy_threads", "%paellapy_extent")}
	mov.u32 %paellapy_scratch, 1;
	mov.b64 %paellapy_weight, {{%paellapy_scratch, %paellapy_threads}};"""
        return f"{weight}\n\t{self._line_address()}"

    def _line_address(self) -> str:
        """%paellapy_line = the counters of SM %paellapy_sm."""
        return f"""{self._descriptor.load("%paellapy_line", "lines")}
	mad.wide.u32 %paellapy_line, %paellapy_sm, {SM_LINE.itemsize}, %paellapy_line;"""


# %paellapy_block = this block's number in its grid, x fastest. Grid sizes are in constant memory, block indices in slow
# special registers: for a flat grid, the usual case, only the register is read that the kernel has already read.
_BLOCK_NUMBER = """mov.u32 %paellapy_block, %ctaid.x;
	mov.u32 %paellapy_extent, %nctaid.y;
	mov.u32 %paellapy_scratch, %nctaid.z;
	mul.lo.u32 %paellapy_scratch, %paellapy_scratch, %paellapy_extent;
	setp.eq.u32 %paellapy_flat, %paellapy_scratch, 1;
	@%paellapy_flat bra $paellapy_numbered;
	mov.u32 %paellapy_scratch, %ctaid.z;
	mul.lo.u32 %paellapy_scratch, %paellapy_scratch, %paellapy_extent;
	mov.u32 %paellapy_extent, %ctaid.y;
	add.u32 %paellapy_scratch, %paellapy_scratch, %paellapy_extent;
	mov.u32 %paellapy_extent, %nctaid.x;
	mad.lo.u32 %paellapy_block, %paellapy_scratch, %paellapy_extent, %paellapy_block;
$paellapy_numbered:"""

# Threads that leave at different times are counted in shared memory. Lanes that leave together are counted by the
# lowest of them. Thread 0 stores its slot and start time before it counts.
_COUNT_OUT_BEGIN = """
	.shared .align 4 .b8 paellapy_out[12];
	@!%paellapy_other st.shared.u32 [paellapy_out], 0;
	bar.sync 0;"""
_KEEP_SLOT = """
	@%paellapy_other bra $paellapy_leaving;
	st.shared.u32 [paellapy_out+4], %paellapy_slot;
	st.shared.u32 [paellapy_out+8], %paellapy_start;
	fence.acq_rel.cta;
$paellapy_leaving:"""
_FETCH_SLOT = """
	ld.shared.u32 %paellapy_slot, [paellapy_out+4];
	ld.shared.u32 %paellapy_start, [paellapy_out+8];"""
_COUNT_OUT = """
	activemask.b32 %paellapy_gone;
	mov.u32 %paellapy_scratch, %lanemask_lt;
	and.b32 %paellapy_scratch, %paellapy_scratch, %paellapy_gone;
	setp.ne.u32 %paellapy_other, %paellapy_scratch, 0;
	@%paellapy_other bra $paellapy_done;
	popc.b32 %paellapy_gone, %paellapy_gone;
	atom.acq_rel.cta.shared.add.u32 %paellapy_scratch, [paellapy_out], %paellapy_gone;
	add.u32 %paellapy_gone, %paellapy_gone, %paellapy_scratch;
	mov.u32 %paellapy_threads, %ntid.x;
	mov.u32 %paellapy_extent, %ntid.y;
	mul.lo.u32 %paellapy_threads, %paellapy_threads, %paellapy_extent;
	mov.u32 %paellapy_extent, %ntid.z;
	mul.lo.u32 %paellapy_threads, %paellapy_threads, %paellapy_extent;
	setp.ne.u32 %paellapy_other, %paellapy_gone, %paellapy_threads;
	@%paellapy_other bra $paellapy_done;"""


def _declared_bytes(tokens: list[Token]) -> int:
    """Bytes declared by a `.shared .align 4 .b8 name[512];` statement."""
    texts = [t.text for t in tokens]
    size = next((int(t[2:]) // 8 for t in texts if t[:2] in (".b", ".u", ".s", ".f") and t[2:].isdigit()), 1)
    count = 1
    for i, text in enumerate(texts):
        if text == "[" and texts[i + 1].isdigit():
            count *= int(texts[i + 1])
    return size * count


# --- the `notify` report: the last block of a launch tells the host that it has started -------------------------------


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
