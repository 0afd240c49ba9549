"""`tl.inline_asm_elementwise`: a piece of PTX run on whole tensors, instruction by instruction."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from paellapy.instrument.triton_ir import elementwise as ew
from paellapy.instrument.triton_ir import libdevice
from paellapy.instrument.triton_ir.types import ELEMENTS, Array, Element, Function, decode, encode

# --- pieces of PTX written by hand: their instructions, and registers read and written as numbers of a type -----------
# A register is an array of bits; each instruction interprets it as the type in its name.

MODES = {"rn": "rn", "rz": "rz", "rm": "rd", "rp": "ru", "rni": "rn", "rzi": "rz", "rmi": "rd", "rpi": "ru"}
_FLOATS = {"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64", "e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}
_TOKEN = re.compile(r"\{[^{}]*\}|[^,]+")
_TYPE = re.compile(r"(?:(?:[subf]|bf|tf)\d+|e4m3|e5m2)(?:x2)?|pred")


class UnknownPtx(Exception):
    """An instruction that cannot be evaluated here; the message is the instruction."""


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # "p", "!p" or none

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(m for m in self.modifiers if _TYPE.fullmatch(m))

    @property
    def mode(self) -> str:
        """The direction of rounding; "" if none is given."""
        return next((MODES[m] for m in self.modifiers if m in MODES), "")

    def unknown(self) -> UnknownPtx:
        return UnknownPtx(".".join((self.name, *self.modifiers)))

    def allow(self, *modifiers: str | Set[str]) -> None:
        """Refuses the instruction if it has a modifier, other than a type, that is not among these."""
        known: set[str] = set()
        known.update(*({m} if isinstance(m, str) else m for m in modifiers))
        if not set(self.modifiers) - set(self.types) <= known:
            raise self.unknown()


def parse(text: str) -> list[Instruction]:
    """The instructions of a piece of PTX, without declarations, comments and outer braces."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).replace("\\n", " ").replace("\\t", " ")
    found = []
    for line in text.split(";"):
        line = line.strip()
        while line[:1] in ("{", "}") and not re.match(r"\{[^{}]*\}\s*,", line):
            line = line[1:].strip()
        if not line or line.startswith(".reg"):
            continue
        m = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([\w.]+)(?:\s+(.*))?", line, re.S)
        if m is None:
            raise UnknownPtx(line)
        name, *modifiers = m[3].split(".")
        operands = tuple(t.strip() for t in _TOKEN.findall(m[4] or ""))
        found.append(Instruction(name, tuple(modifiers), operands, (m[1] + m[2]) if m[2] else ""))
    return found


def element_of(kind: str) -> Element | None:
    """The element type of a PTX type of floats; None for other types."""
    return ELEMENTS.get(_FLOATS.get(kind, ""))


def read(bits: Array, kind: str) -> Any:
    """A register as numbers of a PTX type."""
    element = element_of(kind)
    if element is not None:
        return decode(resized(bits, element.size).view(element.storage), element)
    size = int(kind[1:]) // 8
    return resized(bits, size).view(f"{'i' if kind[0] == 's' else 'u'}{size}")


def write(value: Any, kind: str) -> Array:
    """Numbers as a register of a PTX type."""
    element = element_of(kind)
    if element is not None:
        raw: Array = np.ascontiguousarray(encode(np.asarray(value, element.compute), element))
        return raw.view(f"u{element.size}")
    size = int(kind[1:]) // 8
    whole: Array = np.ascontiguousarray(value)
    return whole.astype(f"{whole.dtype.kind}{size}").view(f"u{size}") if whole.dtype.kind in "iu" else whole


def resized(bits: Array, size: int) -> Array:
    return bits if bits.dtype.itemsize == size else bits.astype(f"u{size}")


def halves(fn: Function, target: str, source: str) -> Function:
    """An instruction on the two numbers in each register (`f16x2`, `e4m3x2`)."""

    def half(bits: Array, kind: str, shift: int) -> Array:
        size = _type_size(kind)
        word = resized(bits, 2 * size)
        part: Array = (word >> word.dtype.type(shift * 8 * size)).astype(f"u{size}")
        return part

    def run(*words: Array) -> Array:
        low, high = (write(fn(*(read(half(w, source, k), source) for w in words)), target) for k in (0, 1))
        return joined(low, high)

    return run


def _type_size(kind: str) -> int:
    element = element_of(kind)
    return element.size if element else int(kind[1:]) // 8


def joined(low: Array, high: Array) -> Array:
    """Two numbers in one register."""
    size = low.dtype.itemsize
    wide = np.dtype(f"u{2 * size}")
    both: Array = low.astype(wide) | high.astype(wide) << wide.type(8 * size)
    return both


# --- PTX's `cvt` on whole tensors: between integers and floats, to pairs of narrow floats, and to tf32 ----------------


def convert(i: Instruction) -> Function:
    """The function of a `cvt`; raises `UnknownPtx`."""
    if len(i.types) != 2:
        raise i.unknown()
    target, source = i.types
    if target == "tf32" and source == "f32":
        i.allow("rna", "rn", "rz")
        return _to_tf32(i)
    i.allow(MODES.keys(), "ftz", "sat", "relu", "satfinite")
    to, of = target.removesuffix("x2"), source.removesuffix("x2")
    narrow = {"e4m3", "e5m2"}  # which exist in pairs only
    if {target, source} & {"tf32", *narrow} or (to in narrow) != ("satfinite" in i.modifiers):
        raise i.unknown()
    one = _one(i, to, of)
    if source.endswith("x2"):
        if not target.endswith("x2"):
            raise i.unknown()
        return halves(one, to, of)
    if target.endswith("x2"):
        if element_of(to) is None:
            raise i.unknown()
        return lambda high, low: joined(write(one(read(low, of)), to), write(one(read(high, of)), to))
    # A signed result fills the whole register with its sign.
    stored = "s32" if to in ("s8", "s16") else to
    return lambda bits: write(one(read(bits, of)), stored)


def _one(i: Instruction, to: str, of: str) -> Function:
    """The conversion of numbers."""
    target, source, mode = element_of(to), element_of(of), i.mode
    if target is None:
        kind = f"{'i' if to[0] == 's' else 'u'}{int(to[1:]) // 8}"
        if source is not None:
            return lambda value: ew.round_to_integer(value, mode or "rz", kind)
        if "sat" not in i.modifiers:
            return lambda value: value.astype(kind)
        limits = np.iinfo(kind)
        return lambda value: np.clip(value, *_within(value.dtype, limits)).astype(kind)
    if target.narrow and (mode in ("ru", "rd") or (mode == "rz" and source is None)):
        raise i.unknown()
    if to == "bf16" and of in ("s64", "u64"):  # not every one is a float of 64 bits
        raise i.unknown()

    def to_float(value: Any) -> Any:
        if "relu" in i.modifiers:
            value = np.maximum(value, value.dtype.type(0))
        if source is None:
            wide = value.astype(f"{value.dtype.kind}8")
            value = ew.to_float(wide, mode or "rn", "f4" if to == "f32" else "f8")
        elif any(m.endswith("i") for m in i.modifiers if m in MODES):  # a whole number, as a float
            value = ew.whole(value, mode)
        elif mode == "rz" and target.narrow:
            value = ew.convert("arith.truncf", ELEMENTS["f32"], target, "rtz")(value)
        elif to == "f32" and of == "f64" and mode:
            value = ew.to_float(value, mode, "f4")
        if "sat" in i.modifiers:
            value = saturated(value)
        return _to_odd(value) if target.narrow and value.dtype == np.float64 else value

    return to_float


def _to_odd(value: Any) -> Any:
    """A float of 64 bits as one of 32 that can be rounded once more: its last bit says that digits were lost."""
    cut = np.asarray(ew.to_float(value, "rz", "f4"))
    lost = np.isfinite(value) & (cut.astype(np.float64) != value)
    return (cut.view(np.uint32) | lost).view(np.float32)


def saturated(value: Any) -> Any:
    """The number limited to 0 … 1, as `.sat` has it: not a number becomes 0, and so does -0."""
    return np.clip(np.nan_to_num(value), 0, 1) + value.dtype.type(0)


def _within(dtype: Any, limits: Any) -> tuple[int, int]:
    """The limits of an integer type, as far as another one reaches."""
    own = np.iinfo(dtype)
    return max(own.min, limits.min), min(own.max, limits.max)


def _to_tf32(i: Instruction) -> Function:
    """The upper 19 bits of a float32, rounded; `rna` rounds halves away from zero."""

    def run(bits: Array) -> Array:
        word = resized(bits, 4)
        even = (word >> np.uint32(13)) & np.uint32(1)
        more = {"rna": np.uint32(0x1000), "rn": np.uint32(0xFFF) + even, "rz": np.uint32(0)}[i.modifiers[0]]
        finite = (word & np.uint32(0x7F800000)) != 0x7F800000
        return np.where(finite, (word + more) & np.uint32(0xFFFFE000), word)

    return run


# --- PTX instructions evaluated on whole tensors: the ones that kernels commonly write by hand ------------------------
# Instructions and modifiers that are not named below are refused when the kernel is translated.

_FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "fma": ew.fma, "mad": ew.fma,
    "max": ew.max_number, "min": ew.min_number, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rsqrt": ew.rsqrt,
    "rcp": lambda x: x.dtype.type(1) / x, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "sin": np.sin,
    "cos": np.cos, "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
_INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "max": np.maximum,
    "min": np.minimum, "neg": np.negative, "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "div": ew.divide, "rem": np.fmod,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32), "clz": lambda x: ew.leading_zeros(x).astype(np.uint32),
    "brev": lambda x: libdevice.FUNCTIONS["brev"](x.view(f"i{x.dtype.itemsize}")),
}  # fmt: skip
_PREDICATE: dict[str, Function] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
    "mov": lambda a: np.asarray(a) != 0,
}  # fmt: skip
_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
# A comparison of floats with NaN is false, or true if its name ends in `u`.
_COMPARE_FLOATS: dict[str, Function] = {
    **{name: _COMPARE[name] for name in ("eq", "lt", "le", "gt", "ge")}, "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _arithmetic(i: Instruction) -> Function:
    kind = i.types[-1] if i.types else ""
    if kind.endswith("x2"):
        return halves(_plain(i, kind[:-2]), kind[:-2], kind[:-2])
    if "wide" in i.modifiers and i.name in ("mul", "mad"):
        return _wide(i, kind)
    fn, out = _plain(i, kind), "u32" if i.name in ("popc", "clz") else kind
    return lambda *args: write(fn(*(read(a, kind) for a in args)), out)


def _wide(i: Instruction, kind: str) -> Function:
    """A product of twice the width."""
    i.allow("wide")
    if i.operands[3:] and i.operands[3][:1] in "-0123456789":
        raise i.unknown()  # a number has no width of its own
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 4}"

    def run(a: Array, b: Array, *c: Array) -> Array:
        product = read(a, kind).astype(dtype) * read(b, kind).astype(dtype)
        return write(product + read(c[0], wide) if c else product, wide)

    return run


def _plain(i: Instruction, kind: str) -> Function:
    if element_of(kind) is None:
        fn = _integer(i, kind)
    else:
        nan = ("NaN",) if i.name in ("min", "max") else ()
        i.allow(MODES.keys(), "ftz", "approx", "full", "sat", *nan)
        if i.mode not in ("", "rn") and i.name in ("add", "sub", "mul", "div", "fma", "sqrt", "rcp"):
            fn = ew.directed(i.name, i.mode)
        elif "NaN" in i.modifiers:
            fn = {"max": ew.max_nan, "min": ew.min_nan}[i.name]
        elif i.name in _FLOAT:
            fn = _FLOAT[i.name]
        else:
            raise i.unknown()
    if getattr(fn, "nin", len(i.operands) - 1) != len(i.operands) - 1:
        raise i.unknown()
    if "sat" not in i.modifiers:
        return fn
    return lambda *args: saturated(fn(*args))


def _integer(i: Instruction, kind: str) -> Function:
    i.allow("lo", "hi")
    if "hi" in i.modifiers:
        if i.name != "mul":
            raise i.unknown()
        return lambda a, b: ew.high_product(a, b, kind[0] == "s")
    if i.name not in _INTEGER:
        raise i.unknown()
    return _INTEGER[i.name]


def _shift(i: Instruction) -> Function:
    kind = i.types[-1]
    bits = int(kind[1:])

    def run(a: Array, n: Array) -> Array:
        value, by = read(a, kind), np.minimum(resized(n, 4), np.uint32(bits))
        small = np.minimum(by, np.uint32(bits - 1)).astype(value.dtype)
        moved = value << small if i.name == "shl" else value >> small
        gone = (value >> value.dtype.type(bits - 1)) if i.name == "shr" and kind[0] == "s" else np.zeros_like(value)
        return write(np.where(by >= bits, gone, moved), kind)

    return run


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out, bits = np.zeros_like(a), int(np.ravel(table)[0])
    for k in range(8):
        if bits >> k & 1:
            out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return out


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    s = selector.astype(np.uint64)
    out: Array = np.zeros(1, np.uint64)
    for k in range(4):
        nibble = s >> np.uint64(4 * k)
        byte = pool >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        out = out | np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * k)
    return out.astype(np.uint32)


def _extract(i: Instruction) -> Function:
    kind = i.types[-1]
    bits = int(kind[1:])

    def run(a: Array, at: Array, count: Array) -> Array:
        value = read(a, kind)
        limited = (np.minimum(resized(v, 4) & np.uint32(255), np.uint32(bits)) for v in (at, count))
        at, count = (v.astype(value.dtype) for v in limited)
        gone = at == bits  # of a signed number, the sign remains
        down = value >> np.where(gone, bits - 1, at)
        if kind[0] == "u":
            down = np.where(gone, 0, down).astype(value.dtype)
        rest = np.minimum(bits - count, bits - 1).astype(value.dtype)
        out = down << rest >> rest
        return write(np.where(count == 0, np.zeros_like(out), out), kind)

    return run


def _insert(a: Array, b: Array, at: Array, count: Array) -> Array:
    kind = b.dtype.type
    mask = np.where(count >= 8 * b.dtype.itemsize, kind(0) - kind(1), (kind(1) << count.astype(b.dtype)) - kind(1))
    mask = mask << at.astype(b.dtype)
    inserted: Array = (b & ~mask) | (a.astype(b.dtype) << at.astype(b.dtype) & mask)
    return inserted


def _funnel(i: Instruction) -> Function:
    def run(low: Array, high: Array, by: Array) -> Array:
        n = by.astype(np.uint64) & np.uint64(31) if "wrap" in i.modifiers else np.minimum(by, 32).astype(np.uint64)
        pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        moved = pair << n >> np.uint64(32) if "l" in i.modifiers else pair >> n
        return moved.astype(np.uint32)

    return run


def meaning(i: Instruction) -> Function:
    """The function of an instruction on the bits of its sources; raises `UnknownPtx`."""
    if i.types == ("pred",) and i.name in _PREDICATE:
        return _PREDICATE[i.name]
    if i.name in ("mov", "not") and i.types and i.types[-1] in ("b8", "b16", "b32", "b64", "u16", "u32", "u64", "s32",
                                                                   "s16", "s64", "f32", "f64"):  # fmt: skip
        return (lambda a: a) if i.name == "mov" else (lambda a: ~a)
    special = {"shl": _shift, "shr": _shift, "cvt": convert, "bfe": _extract, "shf": _funnel}
    if i.name in special and i.types:
        return special[i.name](i)
    if i.name == "lop3" and i.modifiers == ("b32",):
        return _lop3
    if i.name == "prmt" and i.modifiers == ("b32",):
        return _prmt
    if i.name == "bfi":
        return _insert
    if i.name == "selp":
        return lambda a, b, p: np.where(p, a, b)
    if i.name == "setp":
        return _compare(i)
    return _arithmetic(i)


def _compare(i: Instruction) -> Function:
    kind = i.types[-1] if i.types else ""
    floats = element_of(kind) is not None
    compare = (_COMPARE_FLOATS if floats else _COMPARE).get(i.modifiers[0])
    if compare is None or not kind or "|" in i.operands[0] or len(i.operands) != 3:
        raise i.unknown()
    i.allow(i.modifiers[0], "ftz")
    if "ftz" in i.modifiers:
        return lambda a, b: compare(_flushed(read(a, kind)), _flushed(read(b, kind)))
    return lambda a, b: compare(read(a, kind), read(b, kind))


def _flushed(value: Array) -> Array:
    """Numbers below the normal ones as 0."""
    return np.where(np.abs(value) < np.finfo(value.dtype).tiny, np.zeros_like(value), value)


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
