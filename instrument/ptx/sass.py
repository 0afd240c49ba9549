"""Machine code of Hopper GPUs, read from a cubin: each instruction's kind, the results it waits for, and its jumps.

NVIDIA does not document the encoding. An instruction has 128 bits; besides the operation it has the cycles until the
next one may be issued, and up to six barriers that it waits for or sets (Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", 2018). Opcodes and the distance of a jump were found in disassembled kernels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
