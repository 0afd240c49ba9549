"""Where a kernel records its ranges: markers are joined to moments, and moments to records.

ptxas moves no instruction across a reading of the clock, so each reading costs more than its own instruction. Hence:
* Markers with next to nothing between them share one moment, that is one reading.
* A moment next to an asynchronous matrix instruction is taken at it, if only some arithmetic lies between. ptxas
  overlaps this arithmetic with that of the neighbouring range, unless the clock is read in the middle of it.
* The moments of a straight line of code share a record: clocks stay in registers until one store writes them.
* A record is stored as late as possible, at the end of the line. A store occupies its registers until the memory system
  has read them; before the copies of a loop, ptxas lets these copies wait for the registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paellapy.instrument.markers import Marker
from paellapy.instrument.ptx.flow import COMPUTES
from paellapy.instrument.ptx.statements import Kind, Statement
from paellapy.instrument.records import RANGE_RECORD

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
