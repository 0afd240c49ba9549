"""The range pass: turns every marker of a range into an event, recorded by one thread of the block, or of each warp.

A record is 16 bytes, its site and up to three clocks, stored to memory that belongs to the block (and
the warp) alone: no atomics, no shared memory, no branch, no waiting. The block's number in the grid gives its place.
The SM's clock is read because it counts every cycle and costs little; `%globaltimer` ticks every 32 ns on an H200. The
clock at the block's start and end is stored beside the records, so the host can place events on the time line of the
block's record.

The layout is that of records.py: per block and lane a RANGE_HEAD and a ring of RANGE_RECORD. A ring is aligned to its
size, so one operation (and, or) turns its offset into an address.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from paellapy.instrument.errors import ArgumentError, InstrumentError
from paellapy.instrument.ptx.descriptor import Load, count_warps, linear_index
from paellapy.instrument.ptx.flow import COMPUTES, Names, is_special, written
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, statements
from paellapy.instrument.records import RANGE_END, RANGE_HEAD, RANGE_RECORD, field_offset

# --- markers of ranges in kernels: lines of PTX without effect, which the range pass turns into events ----------------
# A range is a named part of a kernel. Its begin and its end are marked with a `.pragma`, which all compilers preserve
# and which assemblers ignore. Where the pass stores a record of events, it leaves a comment that says which (`Sites`).

_TEXT = re.compile(r'\.pragma\s+\\?"paellapy (begin|end) (block|warp) ([^"\\]+)\\?"')
_NAME = re.compile(r"[\w .,:/+*()<>=-]{1,60}")
_SITE = re.compile(r"// paellapy record (\d+):([-+\d |]+)")


@dataclass(frozen=True, slots=True)
class Marker:
    """One begin or end. `per_warp`: recorded by every warp that passes, not only by the block's first."""

    begins: bool
    per_warp: bool
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(
                f"range name {self.name!r}: it must have 1 to 60 letters, digits and spaces",
                field="name", given=self.name, limit=60,
            )

    @property
    def ptx(self) -> str:
        kind, who = "begin" if self.begins else "end", "warp" if self.per_warp else "block"
        return f'.pragma "paellapy {kind} {who} {self.name}";'

    @classmethod
    def of(cls, text: str) -> Marker | None:
        """The marker in a line of PTX, also in MLIR's quoting."""
        found = _TEXT.search(text.replace("\\22", '"'))
        return cls(found[1] == "begin", found[2] == "warp", found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Ranges:
    """The ranges of one kernel: names in order of first appearance, and whether warps record their own."""

    names: tuple[str, ...] = ()
    per_warp: bool = False

    @classmethod
    def in_text(cls, text: str) -> Ranges:
        """The ranges in a kernel's PTX or TTIR."""
        found = _TEXT.findall(text.replace("\\22", '"')) if "paellapy " in text else []
        return cls(tuple(dict.fromkeys(name for _, _, name in found)), any(who == "warp" for _, who, _ in found))

    def lanes(self, threads: int) -> int:
        """Lanes of events per block: one, or one for each of its warps."""
        return -(-threads // 32) if self.per_warp else 1


Moments = tuple[tuple[int, ...], ...]  # of one record: for each of its clocks the tags of the events


@dataclass(frozen=True, slots=True)
class Sites:
    """The places in a kernel's code that store a record, by number.

    >>> sites = Sites(((((0,), (0 | RANGE_END, 1))),))
    >>> sites.comment(0), Sites.in_text(sites.comment(0)) == sites
    ('// paellapy record 0: +0 | -0 +1', True)
    """

    moments: tuple[Moments, ...] = ()

    @classmethod
    def in_text(cls, text: str) -> Sites:
        """The sites in PTX after the passes."""
        found = {int(number): _markers_moments(rest) for number, rest in _SITE.findall(text)}
        return cls(tuple(found[number] for number in range(len(found))))

    def comment(self, number: int) -> str:
        words = (" ".join(f"{'-' if tag & RANGE_END else '+'}{tag & ~RANGE_END}" for tag in tags)
                 for tags in self.moments[number])  # fmt: skip
        return f"// paellapy record {number}: {' | '.join(words)}"


def _markers_moments(text: str) -> Moments:
    return tuple(
        tuple(int(word[1:]) | (RANGE_END if word[0] == "-" else 0) for word in moment.split())
        for moment in text.split("|")
    )


# --- where a kernel records its ranges: markers are joined to moments, and moments to records -------------------------
# ptxas moves no instruction across a reading of the clock, so each reading costs more than its own instruction. Hence:
# * Markers with next to nothing between them share one moment, that is one reading.
# * A moment next to an asynchronous matrix instruction is taken at it, if only some arithmetic lies between. ptxas
#   overlaps this arithmetic with that of the neighbouring range, unless the clock is read in the middle of it.
# * The moments of a straight line of code share a record: clocks stay in registers until one store writes them.
# * A record is stored as late as possible, at the end of the line. A store occupies its registers until the memory
#   system has read them; before the copies of a loop, ptxas lets these copies wait for the registers.

MOST_CLOCKS: int = RANGE_RECORD["clocks"].shape[0]
_TOGETHER = 4  # instructions of arithmetic; they take about as long as an event
_NEAR = 128  # likewise: the accumulators that a thread of an attention kernel scales and converts, with room


@dataclass(slots=True)
class Moment:
    """One reading of the clock, and the markers that it stands for."""

    at: int  # it is read before this statement of the body
    markers: list[Marker]

    @property
    def per_warp(self) -> bool:
        return self.markers[0].per_warp


@dataclass(slots=True)
class Record:
    """Moments whose clocks one store writes."""

    moments: list[Moment]
    stored_at: int  # before this statement of the body


def marker_of(s: Statement) -> Marker | None:
    return Marker.of(str(s)) if s.opcode == ".pragma" else None


def records(body: list[Statement]) -> list[Record]:
    """The moments of a body, by the record that holds them."""
    found: list[Record] = []
    for line in straight_lines(body):
        first = len(found)
        for moment in _moments(body, line):
            last = found[-1] if len(found) > first else None
            if last and len(last.moments) < MOST_CLOCKS and moment.per_warp == last.moments[0].per_warp:
                last.moments.append(moment)
                continue
            if last:
                last.stored_at = moment.at
            found.append(Record([moment], line.stop))
    return found


def straight_lines(body: list[Statement]) -> Iterator[range]:
    """Straight lines: statements that run one after the other, once each. Labels for debuggers do not end them."""
    mentioned = {t.text for s in body if s.kind is not Kind.LABEL for t in s.tokens}
    start = 0
    for i, s in enumerate(body):
        joins = s.kind is Kind.LABEL and s.label in mentioned
        if joins or s.is_op("bra", "brx", "call", "ret", "exit", "trap"):
            yield range(start, i)
            start = i + 1
    yield range(start, len(body))


def _moments(body: list[Statement], line: range) -> list[Moment]:
    found: list[Moment] = []
    last = line.start  # the last marker
    for i in line:
        marker = marker_of(body[i])
        if marker is None:
            continue
        if found and marker.per_warp == found[-1].per_warp and _arithmetic(body[last:i]) <= _TOGETHER:
            found[-1].markers.append(marker)
        else:
            if found:
                found[-1].at = _beside_matrix(body, line, found[-1].at, last)
            found.append(Moment(i, [marker]))
        last = i
    if found:
        found[-1].at = _beside_matrix(body, line, found[-1].at, last)
    return found


def _beside_matrix(body: list[Statement], line: range, first: int, last: int) -> int:
    """The place for a moment with markers from `first` to `last`: at the nearest matrix instruction, or `first`."""
    before = _to_matrix(body, range(first - 1, line.start - 1, -1))
    after = _to_matrix(body, range(last + 1, line.stop))
    near = {_arithmetic(body[i + 1 : first]): i + 1 for i in before} | {_arithmetic(body[last:i]): i for i in after}
    return near[min(near)] if near and min(near) <= _NEAR else first


def _to_matrix(body: list[Statement], way: Iterable[int]) -> list[int]:
    """The first matrix instruction on the way, if no other marker and nothing but arithmetic comes before it."""
    for i in way:
        if marker_of(body[i]):
            return []
        if body[i].is_op("wgmma") or body[i].opcode.startswith("fence.proxy.async"):  # it precedes the first of a row
            return [i]
        if not _is_arithmetic(body[i]):
            return []
    return []


def _arithmetic(part: list[Statement]) -> float:
    """The number of its instructions; infinite if one of them is no arithmetic."""
    # A marker in Triton sets a register, since its inline assembly must have a result.
    code = [s for s in part if s.kind is Kind.INSTRUCTION and s.opcode != ";" and not _sets_a_constant(s)]
    return len(code) if all(map(_is_arithmetic, code)) else float("inf")


def _is_arithmetic(s: Statement) -> bool:
    return s.kind is not Kind.INSTRUCTION or s.opcode == ";" or s.is_op(*COMPUTES) or _reads_first_lane(s)


def _reads_first_lane(s: Statement) -> bool:
    """Triton reads the number of a warp from the warp's first thread, to find the part of a matrix for the warp."""
    return s.opcode == "shfl.sync.idx.b32" and s.operands()[4:5] == ["0"]


def _sets_a_constant(s: Statement) -> bool:
    return s.is_op("mov") and not s.guard and s.operands()[-1].isdigit()


# --- moves the arithmetic of addresses ahead of a clock reading at the end of a range ---------------------------------
# ptxas computes the addresses of the next copies while a matrix instruction runs, but it moves no instruction across a
# reading of the clock. With a reading after the matrix instruction, the copies would wait for their addresses.

_ACCESSES = ("ld", "ldmatrix", "st", "stmatrix", "cp", "atom", "red", "prefetch", "wgmma")
_FLOAT = re.compile(r"\.(b?f\d|tf32|e\dm\d)")


def early_addresses(
    body: list[Statement], lines: Iterable[range], readings: Mapping[int, bool], names: Names
) -> dict[int, int]:
    """Statements that move: the place of each, and the place of the reading before which it goes.

    `lines` are straight lines of code. `readings` says for each place whether statements may move ahead of it: not
    where a range begins, since its own arithmetic would leave it. Only code behind an asynchronous matrix instruction
    moves, since elsewhere nothing hides its time.
    """
    pending: set[str] = set()  # registers that matrix instructions write at some later time
    for s in body:
        if s.is_op("wgmma", "tcgen05"):
            pending |= written(s, names)
    moved: dict[int, int] = {}
    for line in lines:
        start = next((i for i in line if body[i].is_op("wgmma")), line.stop)
        if any(readings.get(i) for i in range(start, line.stop)):
            moved |= _early(body, range(start, line.stop), readings, names, pending)
    return moved


def _early(
    body: list[Statement], line: range, readings: Mapping[int, bool], names: Names, pending: set[str]
) -> dict[int, int]:
    addresses = _addresses(body, line, names)
    moved: dict[int, int] = {}
    depth, reading = 0, line.start
    used: set[str] = set()  # registers of the statements that stay behind the last reading
    changed: set[str] = set()
    for i in line:
        s = body[i]
        if i in readings:
            depth, reading, used, changed = 0, i, set(), set()
        depth += (s.kind is Kind.OPEN) - (s.kind is Kind.CLOSE)
        results, mine = written(s, names), _mentioned(s, names)
        early = depth == 0 and results and results <= addresses and _computes_integers(s) and not mine & pending
        if readings.get(reading) and early and not results & used and not mine & changed:
            moved[i] = reading
        else:
            used |= mine
            changed |= results
    return moved


def _addresses(body: list[Statement], line: range, names: Names) -> set[str]:
    """Registers from which the line's accesses to memory take their addresses, directly or through arithmetic."""
    found: set[str] = set()
    for i in reversed(line):
        s = body[i]
        if s.is_op(*_ACCESSES):
            found |= _address_operands(s, names)
        elif _computes_integers(s) and written(s, names) & found:
            found |= _mentioned(s, names)
    return found


def _address_operands(s: Statement, names: Names) -> set[str]:
    """Registers in brackets; of copies and matrix instructions all but vectors: also sizes and descriptors."""
    found: set[str] = set()
    brackets = braces = 0
    for text in s.operands():
        brackets += (text == "[") - (text == "]")
        braces += (text == "{") - (text == "}")
        if (brackets or (s.is_op("cp", "wgmma") and not braces)) and (name := names.register(text)):
            found.add(name)
    return found


def _mentioned(s: Statement, names: Names) -> set[str]:
    return {name for text in (s.guard, *s.operands()) if text and (name := names.register(text))}


def _computes_integers(s: Statement) -> bool:
    """Whether it computes integers from its operands alone. Arithmetic with a carry (`add.cc`) also sets a flag."""
    if s.guard or not s.is_op(*COMPUTES) or ".cc" in s.opcode or _FLOAT.search(s.opcode):
        return False
    return not any(map(is_special, s.operands()))


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
                f"kernel {entry.name!r}: {function.name!r} has a range and is not inlined. Mark it __forceinline__.",
                kernel=entry.name, field="range", given=function.name,
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
        return f"""{linear_index("%paellapy_rt", "%paellapy_ru", "%paellapy_rs")}
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
        return linear_index(out, "%paellapy_ru", "%paellapy_rt", "tid")

    def _lanes(self, out: str) -> str:
        if not self.ranges.per_warp:
            return f"mov.u32 {out}, 1;"
        if self.threads:
            return f"mov.u32 {out}, {self.ranges.lanes(self.threads[0] * self.threads[1] * self.threads[2])};"
        return count_warps(out, "%paellapy_ru")
