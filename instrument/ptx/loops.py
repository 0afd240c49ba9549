"""Loops of a kernel in PTX, and how often `ptxas` repeats their bodies in the machine code.

A loop is a backward jump. `ptxas` unrolls loops: one turn of the machine code then stands for several iterations of the
source, and further iterations may stand before or after it. Both follow from the instructions that it neither drops
nor splits: accesses to global memory, copies, products, barriers, shuffles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paellapy.instrument.ptx.compiled import Compiled
from paellapy.instrument.ptx.sass import Instruction

_KINDS = (
    ("ld.global", "load"), ("ld.volatile.global", "load"), ("ld.relaxed", "load"), ("ld.acquire", "load"),
    ("st.global", "store"), ("atom.", "update"), ("red.", "update"), ("cp.async.bulk", "bulk copy"),
    ("cp.async.commit", ""), ("cp.async.wait", ""), ("cp.async", "copy"), ("mma.", "mma"),
    ("wgmma.mma", "group mma"), ("ldmatrix", "matrix load"), ("bar.sync", "barrier"), ("barrier.sync", "barrier"),
    ("shfl", "shuffle"),
)  # fmt: skip
_ALIKE = {"atomic": "update", "reduction": "update"}
STEADY = frozenset(kind for _, kind in _KINDS if kind)
_LABEL = re.compile(r"\s*(\$?[\w$]+):")
_LOCATION = re.compile(r"\s*\.loc\s+\d+\s+(\d+)")
_INSTRUCTION = re.compile(r"\s*(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)\s*(.*)")
_FLOPS = {"fma": 2, "add": 1, "sub": 1, "mul": 1}


@dataclass(frozen=True, slots=True)
class PtxLoop:
    line: int  # of the source; 0 if unknown
    inside: Counter[str]  # of each kind, the number of instructions in one iteration
    outside: Counter[str]  # the same, before and after it
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a loop of the machine code."""

    source: int  # the loop's number in the source
    iterations: float = 1.0  # of the source
    covered: float = 1.0  # the same, of a walk through the machine code that takes one turn


def ptx_loops(ptx: str, entry: str) -> list[PtxLoop]:
    """The loops of a kernel, in the order of its text."""
    labels: dict[str, int] = {}
    kinds: list[str] = []
    flops: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    line = 0
    for text in _body(ptx, entry).splitlines():
        if found := _LABEL.match(text):
            labels[found[1]] = len(kinds)
        elif found := _LOCATION.match(text):
            line = int(found[1])
        elif found := _INSTRUCTION.match(text):
            name, operands = found[1], found[2]
            target = labels.get(operands.split(";")[0].strip()) if name.startswith("bra") else None
            if target is not None:
                spans[target] = len(kinds), line
            kinds.append(next((kind for start, kind in _KINDS if name.startswith(start)), ""))
            flops.append(_FLOPS.get(name.partition(".")[0], 0) if ".f32" in name else 0)
    total = _counts(kinds, flops)
    loops = []
    for first, (last, line) in sorted(spans.items()):
        inside = _counts(kinds[first : last + 1], flops[first : last + 1])
        loops.append(PtxLoop(line, inside, total - inside, last + 1 - first))
    return loops


def turns(
    code: Sequence[Instruction],
    spans: Sequence[tuple[int, int]],
    walked: Collection[int],
    compiled: Compiled,
    source: Sequence[str],
) -> list[Turn]:
    """For each loop of the machine code, given by its first and last instruction: what one turn stands for.

    `walked`: the instructions that run; `source`: the lines of the source's loops, as `file:line`.
    """
    lines = [int(found[1]) if (found := re.search(r":(\d+)", each)) else 0 for each in source]
    loops = ptx_loops(compiled.ptx, compiled.name)
    loops = [loop for loop in loops if loop.line in lines] or loops  # the rest are slow paths, such as a large sine's
    made: list[Turn] = []
    for first, last in spans:
        inside = machine_counts(code[first : last + 1])
        loop = next((each for each in loops if set(each.inside) & STEADY == set(inside) & STEADY), None)
        following = range(made[-1].source + 1 if made else 0, len(source) - (len(spans) - len(made) - 1))
        if loop is None:
            made.append(Turn(following[0]))
            continue
        loops = loops[loops.index(loop) + 1 :]
        number = next((k for k in following if lines[k] == loop.line), following[0])
        iterations = _repeats(inside, last + 1 - first, loop)
        outside = machine_counts([code[i] for i in walked if not first <= i <= last])
        nested = any(a < first and last < b for a, b in spans)
        made.append(Turn(number, iterations, iterations + (0.0 if nested else _peeled(outside, iterations, loop))))
    return made


def _counts(kinds: Sequence[str], flops: Sequence[int]) -> Counter[str]:
    found = Counter(kind for kind in kinds if kind)
    found["flops"] = sum(flops)
    return +found


def machine_counts(code: Sequence[Instruction]) -> Counter[str]:
    """Instructions of machine code by the kinds of PTX that they come from."""
    found = Counter(_ALIKE.get(each.kind, each.kind) for each in code)
    counts = Counter({kind: n for kind, n in found.items() if kind in STEADY})
    counts["flops"] = sum(each.flops for each in code)
    return +counts


def _body(ptx: str, entry: str) -> str:
    found = re.search(rf"\.entry\s+{re.escape(entry)}\b", ptx)
    if found is None:
        return ""
    following = re.search(r"\.(?:entry|func)\s", ptx[found.end() :])
    return ptx[found.start() : found.end() + following.start()] if following else ptx[found.start() :]


def _repeats(found: Counter[str], length: int, loop: PtxLoop) -> float:
    """Iterations of the source in one turn of the machine code's loop, which has these instructions."""
    kinds = set(found) & set(loop.inside)
    kinds = kinds & STEADY or kinds  # a quotient takes several flops of machine code: only if there is nothing else
    if not kinds:
        return max(1.0, float(round(length / loop.length)))
    ratios = sorted(found[kind] / loop.inside[kind] for kind in kinds)
    return max(1.0, ratios[len(ratios) // 2])


def _peeled(walked: Counter[str], turn: float, loop: PtxLoop) -> float:
    """Iterations that stand before or after the loop in the walked machine code outside it."""
    kinds = set(loop.inside) & STEADY
    extra = [(walked[kind] - loop.outside[kind]) / loop.inside[kind] for kind in kinds]
    return min(max(min(extra), 0.0), turn) if extra else 0.0
