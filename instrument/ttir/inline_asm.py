"""`tl.inline_asm_elementwise`: a piece of PTX run on whole tensors, instruction by instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.ttir.conversion import decode, encode
from paellapy.instrument.ttir.ptx_instructions import meaning
from paellapy.instrument.ttir.ptx_pieces import Function, Instruction, UnknownPtx, parse, resized
from paellapy.instrument.ttir.types import Array, Element

_WIDTHS = {"h": 2, "r": 4, "f": 4, "l": 8, "d": 8, "c": 1, "b": 1}
_NO_EFFECT = ("griddepcontrol", "membar", "fence", "bar", "nanosleep", "prefetch", "discard", "applypriority")


@dataclass(frozen=True, slots=True)
class Assembly:
    """A piece of PTX over registers: `outputs` and `inputs` are the sizes in bytes of $0, $1, … in order."""

    steps: tuple[tuple[Instruction, Function | None], ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    @classmethod
    def of(cls, text: str, constraints: str) -> Assembly:
        kinds = [c.strip() for c in constraints.split(",") if c.strip()]
        for kind in kinds:
            if kind.lstrip("=&") not in _WIDTHS and not kind.startswith("~"):
                raise UnknownPtx(f"with the constraint {kind!r}")
        outputs = tuple(_WIDTHS[c[-1]] for c in kinds if c.startswith("="))
        inputs = tuple(_WIDTHS[c[-1]] for c in kinds if not c.startswith(("=", "~")))
        steps = []
        known = {f"${len(outputs) + k}" for k in range(len(inputs))}
        for i in parse(text):
            if i.name in _NO_EFFECT:
                continue
            steps.append((i, None if _is_packing(i) else meaning(i)))
            target, *sources = (_names(o) for o in i.operands)
            for name in (n for source in sources for n in source if n not in known):
                _value(name, {}, 4)  # a number, or unknown
            known.update(target)
        # without steps, a result only orders operations
        if steps and not {f"${k}" for k in range(len(outputs))} <= known:
            raise UnknownPtx(f"that leaves a result unset: {text!r:.60}")
        return cls(tuple(steps), outputs, inputs)

    def run(self, *inputs: Array) -> list[Array]:
        """The bits of the outputs, from the bits of the inputs."""
        first = len(self.outputs)
        registers = {f"${first + k}": bits for k, bits in enumerate(inputs)}
        for step, fn in self.steps:
            target, *sources = step.operands
            if fn is None:
                made = _pack(step, registers)
            else:
                size = _size(step)
                made = {target: fn(*(_value(s, registers, size) for s in sources))}
            for name, bits in made.items():
                registers[name] = _guarded(step, registers, name, bits)
        unset = _value("0", {}, 4)
        return [resized(registers.get(f"${k}", unset), size) for k, size in enumerate(self.outputs)]


def _names(operand: str) -> list[str]:
    return [n.strip() for n in operand.strip("{}").split(",")]


def _guarded(step: Instruction, registers: dict[str, Array], name: str, bits: Array) -> Array:
    if not step.guard:
        return bits
    condition = registers[step.guard.removeprefix("!")]
    before = registers.get(name, np.zeros_like(bits))
    return np.where(np.logical_not(condition) if step.guard.startswith("!") else condition, bits, before)


def _size(step: Instruction) -> int:
    digits = re.sub(r"\D", "", (step.types or ("b32",))[-1].removesuffix("x2"))
    return 4 if (step.types or ("",))[-1].endswith("x2") else max(1, int(digits or 32) // 8)


def _value(text: str, registers: dict[str, Array], size: int) -> Any:
    if text in registers:
        return registers[text]
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return np.array([int(text[2:], 16)], np.uint32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return np.array([int(text[2:], 16)], np.uint64)
    if re.fullmatch(r"-?\d+\.\d*(?:e-?\d+)?", text):
        return np.array([float(text)], f"f{size}").view(f"u{size}")
    if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)U?", text):
        return np.array([int(text.rstrip("U"), 0) & ((1 << 8 * size) - 1)], f"u{size}")
    raise UnknownPtx(f"operand {text}")


def _is_packing(i: Instruction) -> bool:
    return i.name == "mov" and any(o.startswith("{") for o in i.operands)


def _pack(i: Instruction, registers: dict[str, Array]) -> dict[str, Array]:
    """`mov.b32 {low, high}, word`, and the reverse."""
    size = int(i.types[-1][1:]) // 8
    target, source = i.operands
    names = [n.strip() for n in (target if target.startswith("{") else source)[1:-1].split(",")]
    each = size // len(names)
    if target.startswith("{"):
        word = resized(_value(source, registers, size), size)
        shifts = [word.dtype.type(8 * each * k) for k in range(len(names))]
        return {n: (word >> s).astype(f"u{each}") for n, s in zip(names, shifts, strict=True) if n != "_"}
    parts = [resized(resized(_value(n, registers, each), each), size) for n in names]
    word = parts[0]
    for k, part in enumerate(parts[1:], 1):
        word = word | part << part.dtype.type(8 * each * k)
    return {target: word}


def elementwise(assembly: Assembly, types: list[Element], results: list[Element], pack: int) -> Function:
    """The piece of PTX as a function of tensors of one shape, `pack` neighbouring elements at a time."""

    def run(*tensors: Any) -> tuple[Any, ...]:
        whole = np.broadcast_arrays(*[np.atleast_1d(t) for t in tensors])
        shape = whole[0].shape if whole else (pack,)
        inputs = [w for t, e in zip(whole, types, strict=True) for w in _words(t, e, pack)]
        outputs = iter(assembly.run(*inputs))
        return tuple(_tensor(outputs, e, pack, shape) for e in results)

    return run


def _words(tensor: Array, element: Element, pack: int) -> list[Array]:
    """The registers that hold `pack` elements: 32-bit registers filled with small elements, otherwise one per element.
    """
    raw = np.ascontiguousarray(encode(tensor, element)).view(f"u{element.size}").reshape(-1, pack)
    if element.size >= 4 or pack == 1:
        return [raw[:, k] for k in range(pack)]
    words = np.ascontiguousarray(raw).view(f"u{min(4, element.size * pack)}")
    return [words[:, k] for k in range(words.shape[1])]


def _tensor(outputs: Any, element: Element, pack: int, shape: tuple[int, ...]) -> Array:
    per_word = 1 if element.size >= 4 or pack == 1 else min(4, element.size * pack) // element.size
    words = [resized(next(outputs), element.size * per_word) for _ in range(pack // per_word)]
    count = int(np.prod(shape)) // pack
    columns = np.stack([np.broadcast_to(w, (count,)) for w in words], axis=1)
    raw = np.ascontiguousarray(columns).view(f"u{element.size}").reshape(shape)
    return np.asarray(decode(raw.view(element.storage), element))
