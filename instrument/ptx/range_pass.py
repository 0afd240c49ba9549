"""The range pass: turns every marker of a range into an event, written by one thread of the block, or of each warp.

An event is 8 bytes, clock and tag, stored to memory that belongs to the block (and the warp) alone: no atomics, no
shared memory, no waiting. The block's number in the grid gives its place. The SM's clock is read because it counts
every cycle and costs little; `%globaltimer` ticks every 32 ns on an H200. The clock at the block's start and end is
stored beside the events, so the host can place them on the time line of the block's record.

The layout is that of records.py: per block and lane a head (RANGE_HEAD), then a ring of RANGE_EVENT.
"""

from __future__ import annotations

from collections.abc import Callable

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.markers import Marker, Ranges
from paellapy.instrument.ptx.module import Function, Module, Statement, statements
from paellapy.instrument.records import RANGE_END, RANGE_EVENT, RANGE_HEAD, field_offset

Load = Callable[[str, str], str]  # (register, field of the descriptor) → the instruction that loads it
_COUNT, _CLOCK_END, _CLOCK_START = (field_offset(RANGE_HEAD, n) for n in ("used", "clock_end", "clock_start"))

REGISTERS = """
	.reg .b32 %paellapy_rc, %paellapy_ro, %paellapy_rt, %paellapy_ru, %paellapy_rv;
	.reg .b64 %paellapy_rb, %paellapy_ra;
	.reg .pred %paellapy_rl, %paellapy_rk, %paellapy_rn;"""


def has_markers(module: Module) -> bool:
    return any(_marker(s) for f in module.functions() for s in f.body or ())


def refuse_outside(module: Module, entry: Function) -> None:
    """Raises for markers in called functions, which cannot access the registers of their callers."""
    for function in module.functions():
        if function is not entry and any(_marker(s) for s in function.body or ()):
            raise InstrumentError(
                f"kernel {entry.name!r}: {function.name!r} has a range and is not inlined. Mark it __forceinline__."
            )


class RangePass:
    """Code for one entry: for its beginning, its markers and its end."""

    def __init__(self, entry: Function, load: Load, threads: list[int] | None) -> None:
        self.entry, self.load, self.threads = entry, load, threads
        self.ranges = Ranges.in_text(str(entry))

    def replace_markers(self) -> None:
        body: list[Statement] = []
        assert self.entry.body is not None
        for s in self.entry.body:
            marker = _marker(s)
            body += statements(self._event(marker)) if marker else [s]
        self.entry.body[:] = body

    def _event(self, marker: Marker) -> str:
        tag = self.ranges.names.index(marker.name) | (0 if marker.begins else RANGE_END)
        leads = "%paellapy_rl" if marker.per_warp or not self.ranges.per_warp else "%paellapy_rk"
        return f"""
	{self.load("%paellapy_ru", "range_mask")}
	@{leads} mov.u32 %paellapy_rc, %clock;
	and.b32 %paellapy_rt, %paellapy_ro, %paellapy_ru;
	mad.wide.u32 %paellapy_ra, %paellapy_rt, 1, %paellapy_rb;
	mov.u32 %paellapy_rt, {tag};
	@{leads} st.global.v2.u32 [%paellapy_ra+{RANGE_HEAD.itemsize}], {{%paellapy_rc, %paellapy_rt}};
	{"@" + leads + " " if self.ranges.per_warp else ""}add.u32 %paellapy_ro, %paellapy_ro, {RANGE_EVENT.itemsize};"""

    def prologue(self) -> str:
        """Finds the lane's place. %paellapy_rl: this thread records events; %paellapy_rk: it is the block's first."""
        return f"""{REGISTERS}
	{self._thread("%paellapy_rv")}
	setp.eq.u32 %paellapy_rk, %paellapy_rv, 0;
	{self._block_place("%paellapy_rb")}
	setp.ne.u64 %paellapy_rn, %paellapy_rb, 0;
	{self._lane_place() if self.ranges.per_warp else "mov.pred %paellapy_rl, %paellapy_rk;"}
	and.pred %paellapy_rl, %paellapy_rl, %paellapy_rn;
	and.pred %paellapy_rk, %paellapy_rk, %paellapy_rn;
	mov.u32 %paellapy_ro, 0;"""

    def at_start(self) -> str:
        """For the first thread, where it records the time: its clock, and the time, which distinguishes replays."""
        return f"""
	@%paellapy_rk mov.u32 %paellapy_rc, %clock;
	@%paellapy_rk st.global.v2.u32 [%paellapy_rb+{_CLOCK_START}], {{%paellapy_rc, %paellapy_start}};"""

    def at_exit(self) -> str:
        """For every thread that leaves: stores how much of its lane was used."""
        return f"""
	@%paellapy_rl st.global.u32 [%paellapy_rb+{_COUNT}], %paellapy_ro;"""

    def at_end(self) -> str:
        """For the thread that writes the block's record."""
        return f"""
	{self._block_place("%paellapy_ra")}
	setp.ne.u64 %paellapy_rn, %paellapy_ra, 0;
	mov.u32 %paellapy_rc, %clock;
	@%paellapy_rn st.global.u32 [%paellapy_ra+{_CLOCK_END}], %paellapy_rc;"""

    def _block_place(self, out: str) -> str:
        """The address of the block's first lane; 0 if this launch has no room for events."""
        return f"""mov.u32 %paellapy_rt, %ctaid.z;
	mov.u32 %paellapy_ru, %nctaid.y;
	mov.u32 %paellapy_rc, %ctaid.y;
	mad.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_ru, %paellapy_rc;
	mov.u32 %paellapy_ru, %nctaid.x;
	mov.u32 %paellapy_rc, %ctaid.x;
	mad.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_ru, %paellapy_rc;
	{self._lanes("%paellapy_rc")}
	mul.lo.u32 %paellapy_rt, %paellapy_rt, %paellapy_rc;
	{self.load("%paellapy_ru", "range_mask")}
	add.u32 %paellapy_ru, %paellapy_ru, {RANGE_HEAD.itemsize + 1};
	{self.load(out, "ranges")}
	setp.ne.u64 %paellapy_rn, {out}, 0;
	@%paellapy_rn mad.wide.u32 {out}, %paellapy_rt, %paellapy_ru, {out};"""

    def _lane_place(self) -> str:
        """The lane of the thread's own warp; the first thread of each warp leads it."""
        return f"""{self.load("%paellapy_ru", "range_mask")}
	add.u32 %paellapy_ru, %paellapy_ru, {RANGE_HEAD.itemsize + 1};
	shr.u32 %paellapy_rt, %paellapy_rv, 5;
	@%paellapy_rn mad.wide.u32 %paellapy_rb, %paellapy_rt, %paellapy_ru, %paellapy_rb;
	and.b32 %paellapy_rt, %paellapy_rv, 31;
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


def _marker(s: Statement) -> Marker | None:
    return Marker.of(str(s)) if s.opcode == ".pragma" else None
