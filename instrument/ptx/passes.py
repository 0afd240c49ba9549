"""PTX → PTX passes: `report` (which block runs on which SM, and when), `slice` (run part of a logical grid), `preempt`.

All communicate with the host through one launch descriptor (records.DESCRIPTOR): passed by value as an added last
parameter where we launch, or through a pointer parameter that a foreign launcher fills (Triton's own, under PyTorch).

The design of the reports follows measurements on an H200 (see docs/architecture.md):
* Counters and rings are per SM. One word shared by all blocks costs 30–96 % on short blocks.
* A trace record's slot is reserved by an atomic when the block starts, but the result is first needed when the block
  ends, so the round trip to L2 is hidden behind the kernel's own work.
* Only thread 0 reports, behind a branch: on a kernel of 2.5 µs, reading special registers in every warp costs more than
  the branch. Other threads run the kernel's own instructions plus one predicate.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from paellapy.instrument import markers, records
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.exits import BARRIER_OPS, barrier_at_exit_is_safe, refuse_exit_in_functions
from paellapy.instrument.ptx.module import Function, Kind, Module, Token
from paellapy.instrument.ptx.preempt_pass import preempt_entry
from paellapy.instrument.ptx.range_pass import RangePass, has_markers, refuse_outside
from paellapy.instrument.ptx.slice_pass import slice_entry
from paellapy.instrument.records import DESCRIPTOR, MAGIC, RING_RECORD, SM_LINE, WARP_SHIFT, field_offset

Report = Literal["count", "trace", "notify"]
Exits = Literal["auto", "barrier", "spare-barrier", "count-out"]

_SPARE_BARRIER = 15
_STATIC_SHARED_LIMIT = 48 * 1024
_STARTED, _ENDED, _TAIL = (field_offset(SM_LINE, n) for n in ("started", "ended", "tail"))


@dataclass(frozen=True, slots=True)
class PassConfig:
    """The changes to make to a kernel. Part of every cache key.

    `also_notify` makes a kernel that counts or traces also report when its last block starts. `exits` says how the end
    of a block is detected: "auto" decides from the code (exits.py). `pointer_param` names the parameter that points to
    the descriptor; None adds a parameter passed by value. `preempt` makes blocks look at a flag when they start, and
    not run while it is set; with `sliced`, a launch may then run any list of blocks.
    """

    report: Report | None = None
    sliced: bool = False
    exits: Exits = "auto"
    pointer_param: int | None = None
    also_notify: bool = False
    preempt: bool = False

    def __post_init__(self) -> None:
        if self.report is not None and self.report not in get_args(Report):
            raise InstrumentError(f"unknown report level {self.report!r}; use one of {', '.join(get_args(Report))}")
        if self.exits not in get_args(Exits):
            raise InstrumentError(f"unknown kind of exits {self.exits!r}; use one of {', '.join(get_args(Exits))}")
        if self.sliced and self.pointer_param is not None:
            raise InstrumentError(
                "a kernel launched by other code (pointer_param) cannot be sliced: launch it as a pp.kernel"
            )
        if self.preempt and self.pointer_param is not None:
            raise InstrumentError(
                "a kernel launched by other code (pointer_param) cannot be preempted: launch it as a pp.kernel"
            )

    @property
    def changes_anything(self) -> bool:
        return self.report is not None or self.sliced or self.also_notify or self.preempt

    @property
    def notifies(self) -> bool:
        return self.report == "notify" or self.also_notify

    def notifying(self) -> PassConfig:
        """The same configuration, and the kernel reports when its last block starts."""
        return self if self.notifies else replace(self, also_notify=True)

    def key(self) -> str:
        return (
            f"{self.report}/{self.sliced}/{self.exits}/{self.pointer_param}/{self.also_notify}/{self.preempt}/"
            f"{pass_version()}"
        )


def pass_version() -> str:
    """A digest of the sources that determine the passes' output: changing them invalidates compiled results."""
    return _VERSION


_PATHS = (*sorted(Path(__file__).parent.glob("*.py")), Path(records.__file__), Path(markers.__file__))
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _PATHS)).hexdigest()[:16]


def apply(ptx: str, config: PassConfig, entry: str | None = None) -> str:
    """The module's PTX with the passes applied to one entry (the only one, if not named)."""
    module = Module.parse(ptx)
    function = module.entry(entry)
    if _descriptor_name(function) in function.param_names() or "%paellapy" in str(function):
        raise InstrumentError(f"kernel {function.name!r} is already instrumented: pass the original PTX")
    if config.changes_anything:
        _Editor(module, function, config).run()
    return str(module)


def _descriptor_name(entry: Function) -> str:
    return f"{entry.name}_paellapy"


class _Editor:
    """One entry being edited. Reports are inserted first, so that slicing also renumbers their blocks."""

    def __init__(self, module: Module, entry: Function, config: PassConfig) -> None:
        self.module, self.entry, self.config = module, entry, config
        threads = entry.directive(".reqntid")
        self.threads = [*threads, 1, 1][:3] if threads else None
        self.ranges: RangePass | None = None

    def run(self) -> None:
        if self.config.report in ("count", "trace"):
            refuse_exit_in_functions(self.module, self.entry.name)
        self._add_descriptor()
        if self.config.report == "trace" and self.config.pointer_param is None and has_markers(self.module):
            refuse_outside(self.module, self.entry)
            self.ranges = RangePass(self.entry, self._load, self.threads)
            self.ranges.replace_markers()
        if self.config.report in ("count", "trace"):
            self._report_start_and_end(trace=self.config.report == "trace")
        if self.config.preempt:
            index = self._thread_index_bits("%paellapy_pt", "%paellapy_pu")
            preempt_entry(self.module, self.entry, self._load, index, self.threads, self.config.sliced)
        elif self.config.sliced:
            slice_entry(self.module, self.entry, self._load)
        if self.config.notifies:
            self._notify()  # after slicing: the last block of *this launch* reports

    # -- the descriptor

    def _add_descriptor(self) -> None:
        if self.config.pointer_param is None:
            self._param = _descriptor_name(self.entry)
            self.entry.add_param(f".param .align 8 .b8 {self._param}[{DESCRIPTOR.itemsize}]")
        else:
            names = self.entry.param_names()
            if not -len(names) <= self.config.pointer_param < len(names):
                raise InstrumentError(
                    f"kernel {self.entry.name!r} has no parameter {self.config.pointer_param} that could point to a "
                    "descriptor"
                )
            self._param = names[self.config.pointer_param]

    def _load(self, register: str, field: str) -> str:
        """Loads one field of the descriptor. Passed by value, it is in constant memory and causes no traffic."""
        bits = DESCRIPTOR[field].itemsize * 8
        offset = field_offset(DESCRIPTOR, field)
        if self.config.pointer_param is None:
            return f"ld.param.u{bits} {register}, [{self._param}+{offset}];"
        return f"ld.global.u{bits} {register}, [%paellapy_desc+{offset}];"

    def _guard_pointer(self, skip: str) -> str:
        """Checks the magic number: the pointer may be null, or point to other scratch memory."""
        if self.config.pointer_param is None:
            return ""
        return f"""
	ld.param.u64 %paellapy_desc, [{self._param}];
	setp.eq.u64 %paellapy_foreign, %paellapy_desc, 0;
	@%paellapy_foreign bra {skip};
	{self._load("%paellapy_magic", "magic")}
	setp.ne.u64 %paellapy_foreign, %paellapy_magic, {MAGIC};
	@%paellapy_foreign bra {skip};"""

    # -- the reporting thread

    def _thread_index_bits(self, result: str = "%paellapy_t", scratch: str = "%paellapy_u") -> str:
        """Computes a number that is 0 exactly in the block's first thread."""
        code = f"mov.u32 {result}, %tid.x;"
        for axis, extent in zip("yz", self.threads[1:] if self.threads else (0, 0), strict=True):
            if extent != 1:
                code += f"""
	mov.u32 {scratch}, %tid.{axis};
	or.b32 {result}, {result}, {scratch};"""
        return code

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
        return f"""{self._load("%paellapy_a", "lines")}
	mad.wide.u32 %paellapy_a, %paellapy_sm, {SM_LINE.itemsize}, %paellapy_a;"""

    # -- start and end

    def _report_start_and_end(self, *, trace: bool) -> None:
        exits = self._choose_exits()
        places = self.ranges.prologue() if self.ranges else ""
        self._redirect_exits()
        self.entry.insert_after_first_loads(f"""
	@%paellapy_other bra $paellapy_started;{self._guard_pointer("$paellapy_started")}
	{self._reserve_slot() if trace else self._count_start()}
$paellapy_started:""")
        self.entry.insert_prologue(f"""
	.reg .b32 %paellapy_t, %paellapy_u, %paellapy_v, %paellapy_sm, %paellapy_start, %paellapy_slot;
	.reg .b64 %paellapy_a, %paellapy_w, %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_other, %paellapy_foreign, %paellapy_flat;
	{self._thread_index_bits()}
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
                f"them needs 12 bytes of shared memory, but it already declares {used} of {_STATIC_SHARED_LIMIT} "
                "bytes. Use dynamic shared memory instead, or return from one place."
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
        return f"""{self._load("%paellapy_v", "ring_mask")}
	and.b32 %paellapy_slot, %paellapy_slot, %paellapy_v;
	add.u32 %paellapy_v, %paellapy_v, 1;
	mad.lo.u32 %paellapy_slot, %paellapy_sm, %paellapy_v, %paellapy_slot;
	{self._load("%paellapy_a", "rings")}
	mad.wide.u32 %paellapy_a, %paellapy_slot, {RING_RECORD.itemsize}, %paellapy_a;
	{self._linear_block()}
	{self._load("%paellapy_v", "launch")}"""

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

    # -- notify

    def _notify(self) -> None:
        axes = "x" if self.config.sliced else "xyz"
        tests = ""
        for axis in axes:
            tests += f"""
	mov.u32 %paellapy_nt, %ctaid.{axis};
	mov.u32 %paellapy_nu, %nctaid.{axis};
	add.u32 %paellapy_nt, %paellapy_nt, 1;
	setp.ne.u32 %paellapy_np, %paellapy_nt, %paellapy_nu;
	@%paellapy_np bra $paellapy_notified;"""
        index = self._thread_index_bits("%paellapy_nt", "%paellapy_nu")
        shared = ""  # the report of start and end declares these registers if there is one
        if self.config.report not in ("count", "trace"):
            shared = """
	.reg .b64 %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_foreign;"""
        self.entry.insert_prologue(f"""
	.reg .b32 %paellapy_nt, %paellapy_nu;
	.reg .b64 %paellapy_na, %paellapy_nw;
	.reg .pred %paellapy_np;{shared}{tests}
	{index}
	setp.ne.u32 %paellapy_np, %paellapy_nt, 0;
	@%paellapy_np bra $paellapy_notified;{self._guard_pointer("$paellapy_notified")}
	{self._load("%paellapy_na", "notify")}
	mov.u64 %paellapy_nw, %globaltimer;
	st.relaxed.sys.global.u64 [%paellapy_na], %paellapy_nw;
$paellapy_notified:""")


def _declared_bytes(tokens: list[Token]) -> int:
    """Bytes declared by a `.shared .align 4 .b8 name[512];` statement."""
    texts = [t.text for t in tokens]
    size = next((int(t[2:]) // 8 for t in texts if t[:2] in (".b", ".u", ".s", ".f") and t[2:].isdigit()), 1)
    count = 1
    for i, text in enumerate(texts):
        if text == "[" and texts[i + 1].isdigit():
            count *= int(texts[i + 1])
    return size * count
