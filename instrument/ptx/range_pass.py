"""The range pass: turns every marker of a range into an event, recorded by one thread of the block, or of each warp.

A record is 16 bytes, its site and up to three clocks (range_sites.py), stored to memory that belongs to the block (and
the warp) alone: no atomics, no shared memory, no branch, no waiting. The block's number in the grid gives its place.
The SM's clock is read because it counts every cycle and costs little; `%globaltimer` ticks every 32 ns on an H200. The
clock at the block's start and end is stored beside the records, so the host can place events on the time line of the
block's record.

The layout is that of records.py: per block and lane a RANGE_HEAD and a ring of RANGE_RECORD. A ring is aligned to its
size, so one operation (and, or) turns its offset into an address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.markers import Marker, Ranges, Sites
from paellapy.instrument.ptx.flow import Names
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.ptx.range_motion import early_addresses
from paellapy.instrument.ptx.range_sites import MOST_CLOCKS, Moment, marker_of, records, straight_lines
from paellapy.instrument.ptx.statements import Statement, statements
from paellapy.instrument.records import RANGE_END, RANGE_HEAD, RANGE_RECORD, field_offset

Load = Callable[[str, str], str]  # (register, field of the descriptor) → the instruction that loads it
_USED, _CLOCK_START, _CLOCK_END = (field_offset(RANGE_HEAD, n) for n in ("used", "clock_start", "clock_end"))
_CLOCKS = [f"%paellapy_rc{i}" for i in range(MOST_CLOCKS)]

REGISTERS = f"""
	.reg .b32 %paellapy_ro, %paellapy_re, %paellapy_rlow, %paellapy_rhigh, %paellapy_rt, %paellapy_ru, %paellapy_rv;
	.reg .b32 %paellapy_rs, {", ".join(_CLOCKS)};
	.reg .b64 %paellapy_rb, %paellapy_ra;
	.reg .pred %paellapy_rl, %paellapy_rk, %paellapy_rn;"""


def has_markers(module: Module) -> bool:
    return any(marker_of(s) for f in module.functions() for s in f.body or ())


def refuse_outside(module: Module, entry: Function) -> None:
    """Raises for markers in called functions, which cannot access the registers of their callers."""
    for function in module.functions():
        if function is not entry and any(marker_of(s) for s in function.body or ()):
            raise InstrumentError(
                f"kernel {entry.name!r}: {function.name!r} has a range and is not inlined. Mark it __forceinline__."
            )


class RangePass:
    """Code for one entry: for its beginning, its markers and its end."""

    def __init__(self, entry: Function, load: Load, threads: list[int] | None) -> None:
        self.entry, self.load, self.threads = entry, load, threads
        self.ranges = Ranges.in_text(str(entry))

    def replace_markers(self) -> None:
        assert self.entry.body is not None
        found = records(self.entry.body)
        sites = Sites(tuple(tuple(tuple(map(self._tag, m.markers)) for m in record.moments) for record in found))
        code: defaultdict[int, str] = defaultdict(str)  # by place in the body
        for number, record in enumerate(found):
            for clock, moment in zip(_CLOCKS, record.moments, strict=False):
                code[moment.at] += f"\n\tmov.u32 {clock}, %clock;"
            code[record.stored_at] += self._store(number, record.moments, sites)
        ends = {m.at: not any(marker.begins for marker in m.markers) for record in found for m in record.moments}
        moved = early_addresses(self.entry.body, straight_lines(self.entry.body), ends, Names.of(self.entry))
        ahead: defaultdict[int, list[Statement]] = defaultdict(list)
        for at, reading in moved.items():
            ahead[reading].append(self.entry.body[at])
        body: list[Statement] = []
        for at, s in enumerate(self.entry.body):
            body += ahead[at] + statements(code[at])
            if at not in moved and not marker_of(s):
                body.append(s)
        self.entry.body[:] = body + statements(code[len(self.entry.body)])

    def _tag(self, marker: Marker) -> int:
        return self.ranges.names.index(marker.name) | (0 if marker.begins else RANGE_END)

    def _store(self, number: int, moments: list[Moment], sites: Sites) -> str:
        # Registers are written by all threads, and only the store is guarded: a value of which some threads keep an
        # older one would occupy its register for the whole kernel.
        leads, advances = "%paellapy_rl", ""
        if self.ranges.per_warp and not moments[0].per_warp:
            leads, advances = "%paellapy_rk", "@%paellapy_rk "
        clocks = [_CLOCKS[min(i, len(moments) - 1)] for i in range(1 if len(moments) == 1 else MOST_CLOCKS)]
        return f"""
	{sites.comment(number)}
	{self.load("%paellapy_ru", "range_mask")}
	and.b32 %paellapy_rt, %paellapy_ro, %paellapy_ru;
	or.b32 %paellapy_rt, %paellapy_rt, %paellapy_rlow;
	mov.b64 %paellapy_ra, {{%paellapy_rt, %paellapy_rhigh}};
	mov.u32 %paellapy_rs, {number};
	@{leads} st.global.v{1 + len(clocks)}.u32 [%paellapy_ra], {{%paellapy_rs, {", ".join(clocks)}}};
	{advances}add.u32 %paellapy_ro, %paellapy_ro, {RANGE_RECORD.itemsize};
	{advances}add.u32 %paellapy_re, %paellapy_re, {sum(map(len, sites.moments[number]))};"""

    def prologue(self) -> str:
        """Finds the lane's ring. %paellapy_rl: this thread records events; %paellapy_rk: it is the block's first."""
        return f"""{REGISTERS}
	{self._thread("%paellapy_rv")}
	setp.eq.u32 %paellapy_rk, %paellapy_rv, 0;
	{self._thread_leads()}
	{self.load("%paellapy_rb", "ranges")}
	setp.ne.u64 %paellapy_rn, %paellapy_rb, 0;
	and.pred %paellapy_rl, %paellapy_rl, %paellapy_rn;
	and.pred %paellapy_rk, %paellapy_rk, %paellapy_rn;
	{self._first_lane()}
	{self._own_lane()}
	{self.load("%paellapy_ru", "range_mask")}
	add.u32 %paellapy_ru, %paellapy_ru, 1;
	mad.wide.u32 %paellapy_rb, %paellapy_rt, %paellapy_ru, %paellapy_rb;
	mov.b64 {{%paellapy_rlow, %paellapy_rhigh}}, %paellapy_rb;
	mov.u32 %paellapy_ro, 0;
	mov.u32 %paellapy_re, 0;"""

    def at_start(self) -> str:
        """For the first thread, where it records the time: its clock, and the time, which distinguishes replays."""
        return f"""
	{self._first_lane()}
	{self._head("%paellapy_ra")}
	mov.u32 %paellapy_rs, %clock;
	@%paellapy_rk st.global.v2.u32 [%paellapy_ra+{_CLOCK_START}], {{%paellapy_rs, %paellapy_start}};"""

    def at_exit(self) -> str:
        """For every thread that leaves: stores how much of its lane was used."""
        thread = self._thread("%paellapy_rv") if self.ranges.per_warp else ""
        return f"""
	{thread}
	{self._first_lane()}
	{self._own_lane()}
	{self._head("%paellapy_ra")}
	@%paellapy_rl st.global.v2.u32 [%paellapy_ra+{_USED}], {{%paellapy_ro, %paellapy_re}};"""

    def at_end(self) -> str:
        """For the thread that writes the block's record."""
        return f"""
	{self._first_lane()}
	{self._head("%paellapy_ra")}
	{self.load("%paellapy_rb", "ranges")}
	setp.ne.u64 %paellapy_rn, %paellapy_rb, 0;
	mov.u32 %paellapy_rs, %clock;
	@%paellapy_rn st.global.u32 [%paellapy_ra+{_CLOCK_END}], %paellapy_rs;"""

    def _first_lane(self) -> str:
        """%paellapy_rt = the number of the block's first lane."""
        return f"""mov.u32 %paellapy_rt, %ctaid.z;
	mov.u32 %paellapy_ru, %nctaid.y;
	mov.u32 %paellapy_rs, %ctaid.y;
	mad.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_ru, %paellapy_rs;
	mov.u32 %paellapy_ru, %nctaid.x;
	mov.u32 %paellapy_rs, %ctaid.x;
	mad.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_ru, %paellapy_rs;
	{self._lanes("%paellapy_rs")}
	mul.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_rs;"""

    def _own_lane(self) -> str:
        """%paellapy_rt = the lane of thread %paellapy_rv."""
        if not self.ranges.per_warp:
            return ""
        return """shr.u32 %paellapy_rv, %paellapy_rv, 5;
	add.u32 %paellapy_rt, %paellapy_rt, %paellapy_rv;"""

    def _head(self, out: str) -> str:
        """The head of lane %paellapy_rt: heads lie before the rings, in reverse."""
        return f"""{self.load(out, "ranges")}
	not.b32 %paellapy_rt, %paellapy_rt;
	mad.wide.s32 {out}, %paellapy_rt, {RANGE_HEAD.itemsize}, {out};"""

    def _thread_leads(self) -> str:
        """The first thread of each warp leads its lane, or the first one of the block its only lane."""
        if not self.ranges.per_warp:
            return "mov.pred %paellapy_rl, %paellapy_rk;"
        return """and.b32 %paellapy_rt, %paellapy_rv, 31;
	setp.eq.u32 %paellapy_rl, %paellapy_rt, 0;"""

    def _thread(self, out: str) -> str:
        """The thread's number in its block, x fastest."""
        flat = self.threads is not None and self.threads[1:] == [1, 1]
        if flat:
            return f"mov.u32 {out}, %tid.x;"
        return f"""mov.u32 {out}, %tid.z;
	mov.u32 %paellapy_ru, %ntid.y;
	mov.u32 %paellapy_rt, %tid.y;
	mad.lo.u32 {out}, {out}, %paellapy_ru, %paellapy_rt;
	mov.u32 %paellapy_ru, %ntid.x;
	mov.u32 %paellapy_rt, %tid.x;
	mad.lo.u32 {out}, {out}, %paellapy_ru, %paellapy_rt;"""

    def _lanes(self, out: str) -> str:
        if not self.ranges.per_warp:
            return f"mov.u32 {out}, 1;"
        if self.threads:
            return f"mov.u32 {out}, {self.ranges.lanes(self.threads[0] * self.threads[1] * self.threads[2])};"
        return f"""mov.u32 {out}, %ntid.x;
	mov.u32 %paellapy_ru, %ntid.y;
	mul.lo.u32 {out}, {out}, %paellapy_ru;
	mov.u32 %paellapy_ru, %ntid.z;
	mad.lo.u32 {out}, {out}, %paellapy_ru, 31;
	shr.u32 {out}, {out}, 5;"""
