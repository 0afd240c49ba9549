"""Machine code of Hopper GPUs, read from a cubin: each instruction's kind, the results it waits for, and its jumps.

NVIDIA does not document the encoding. An instruction has 128 bits; besides the operation it has the cycles until the
next one may be issued, and up to six barriers that it waits for or sets (Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", 2018). Opcodes and the distance of a jump were found in disassembled kernels.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paellapy.instrument.ptx.compiled import Compiled

BYTES = 16  # bytes of an instruction
NO_BARRIER = 7

# By the opcode's low nine bits; the three bits above say where operands come from.
_KINDS = {
    0x181: "load", 0x180: "load", 0x184: "shared load", 0x183: "shared load", 0x18C: "shared load",
    0x03B: "matrix load", 0x188: "shared store", 0x187: "shared store", 0x044: "shared store", 0x186: "store",
    0x189: "shuffle", 0x006: "vote", 0x086: "vote", 0x1C4: "vote", 0x0CA: "vote", 0x02F: "vote", 0x108: "special",
    0x1A8: "atomic", 0x1A3: "atomic", 0x1A9: "atomic", 0x1A6: "reduction", 0x119: "read special", 0x1C3: "read special",
    0x182: "constant", 0x106: "convert", 0x112: "convert", 0x105: "convert", 0x110: "convert", 0x107: "convert",
    0x109: "convert", 0x100: "convert", 0x11D: "barrier", 0x1C7: "barrier", 0x03C: "mma", 0x037: "mma",
    0x1F0: "group mma", 0x1F1: "group mma", 0x1F3: "group mma", 0x1AE: "copy", 0x1AF: "commit", 0x11A: "await copies",
    0x1B4: "bulk copy", 0x192: "fence", 0x028: "double", 0x029: "double", 0x02A: "double", 0x02B: "double",
    0x147: "jump", 0x144: "call", 0x143: "call", 0x150: "return", 0x14D: "exit", 0x1C5: "group",
}  # fmt: skip
_FLOPS = {0x020: 1, 0x021: 1, 0x023: 2}  # fp32: FMUL, FADD, FFMA
_POLL_BARRIER = 0x5A7  # waits for a bulk copy
_WIDTHS = {5: 8, 6: 16}  # bytes per thread, if more than four


@dataclass(frozen=True, slots=True)
class Instruction:
    kind: str  # one of _KINDS, "poll", or "" for the rest
    guarded: bool
    stall: int  # cycles until the next one may be issued
    sets: int  # the barrier that signals its result
    frees: int  # the barrier that signals that its operands were read
    awaits: int  # a bit for each barrier
    width: int  # bytes each thread moves
    target: int  # index of the instruction that a jump or call goes to; -1 elsewhere
    left: int  # groups of copies that may still be in flight
    flops: int  # in fp32, by each thread


def instructions(cubin: bytes, entry: str) -> list[Instruction]:
    """The machine code of one kernel, in order; empty if the cubin has no kernel of that name."""
    text = _section(cubin, f".text.{entry}")
    words = struct.unpack(f"<{len(text) // BYTES * 2}Q", text[: len(text) // BYTES * BYTES])
    return [_decode(words[i], words[i + 1], i // 2) for i in range(0, len(words), 2)]


def _decode(low: int, high: int, index: int) -> Instruction:
    kind = "poll" if low & 0xFFF == _POLL_BARRIER else _KINDS.get(low & 0x1FF, "")
    control = high >> 41
    target = -1
    if kind in ("jump", "call"):
        far = (low >> 34) | (high & 0x3FFFF) << 30
        far -= (far >> 47) << 48
        target = index + 1 + (far * 1024 + ((low >> 16) & 0xFF) * 4) // BYTES
    return Instruction(
        kind,
        (low >> 12) & 15 != 7,
        control & 15,
        (control >> 5) & 7,
        (control >> 8) & 7,
        (control >> 11) & 63,
        _WIDTHS.get((high >> 9) & 7, 4),
        target,
        (low >> 38) & 31,
        _FLOPS.get(low & 0x1FF, 0),
    )


def _section(elf: bytes, name: str) -> bytes:
    """A section of a 64-bit ELF file."""
    if elf[:5] != b"\x7fELF\x02":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    (strings,) = struct.unpack_from("<Q", elf, table + names * size + 24)
    for i in range(count):
        at = table + i * size
        (label,) = struct.unpack_from("<I", elf, at)
        end = elf.index(b"\0", strings + label)
        if elf[strings + label : end] == name.encode():
            offset, length = struct.unpack_from("<QQ", elf, at + 24)
            return elf[offset : offset + length]
    return b""


# --- loops of a kernel in PTX, and how often `ptxas` repeats their bodies in the machine code -------------------------
# A loop is a backward jump. `ptxas` unrolls loops: one turn of the machine code then stands for several iterations of
# the source, and further iterations may stand before or after it. Both follow from the instructions that it neither
# drops nor splits: accesses to global memory, copies, products, barriers, shuffles.

_LOOPS_KINDS = (
    ("ld.global", "load"), ("ld.volatile.global", "load"), ("ld.relaxed", "load"), ("ld.acquire", "load"),
    ("st.global", "store"), ("atom.", "update"), ("red.", "update"), ("cp.async.bulk", "bulk copy"),
    ("cp.async.commit", ""), ("cp.async.wait", ""), ("cp.async", "copy"), ("mma.", "mma"),
    ("wgmma.mma", "group mma"), ("ldmatrix", "matrix load"), ("bar.sync", "barrier"), ("barrier.sync", "barrier"),
    ("shfl", "shuffle"),
)  # fmt: skip
_ALIKE = {"atomic": "update", "reduction": "update"}
STEADY = frozenset(kind for _, kind in _LOOPS_KINDS if kind)
_LABEL = re.compile(r"\s*(\$?[\w$]+):")
_LOCATION = re.compile(r"\s*\.loc\s+\d+\s+(\d+)")
_INSTRUCTION = re.compile(r"\s*(?:@!?%?[\w$]+\s+)?([a-z][\w.:]*)\s*(.*)")
_LOOPS_FLOPS = {"fma": 2, "add": 1, "sub": 1, "mul": 1}


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
            kinds.append(next((kind for start, kind in _LOOPS_KINDS if name.startswith(start)), ""))
            flops.append(_LOOPS_FLOPS.get(name.partition(".")[0], 0) if ".f32" in name else 0)
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
