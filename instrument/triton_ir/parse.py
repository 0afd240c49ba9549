"""TTIR text to a tree of ops.

TTIR prints one op per line: a region opens with `{` at a line's end and closes on a line that starts with `}`. Every op
keeps its location. The same code reads the text of Triton 3.6 to 3.9."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache

from paellapy.instrument.errors import UnsupportedOpError
from paellapy.instrument.triton_ir.types import Type, parse_type

# --- pieces of MLIR syntax: brackets, strings, attribute dictionaries, location suffixes ------------------------------

STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')

_ESCAPE = re.compile(r'(?:\\[0-9A-Fa-f]{2})+|\\[\\"nt]')


def unescaped(text: str) -> str:
    """The contents of a string: MLIR writes a line's end as `\\0A`, a quotation mark as `\\22`."""
    return _ESCAPE.sub(lambda m: _characters(m[0].replace("\\", "") or "\\"), text)


def _characters(code: str) -> str:
    if len(code) == 1:
        return {"n": "\n", "t": "\t"}.get(code, code)
    return bytes.fromhex(code).decode("utf-8", "replace")


def closing(text: str, start: int) -> int:
    """Index just past the parenthesis that closes the one opened before `start`; strings are skipped."""
    depth, i, quoted = 1, start, False
    while depth:
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "(<[":
            depth += 1
        elif c in ")>]" and not (c == ">" and text[i - 1] == "-"):
            depth -= 1
        i += 1
    return i


def split_top(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside brackets and strings; empty parts are dropped."""
    parts, depth, start = [], 0, 0
    for found in _marks(separator).finditer(text):
        mark = found[0]
        if not mark:  # a separator begins here
            if depth == 0:
                parts.append(text[start : found.start()])
                start = found.start() + len(separator)
        elif mark in "<([{":
            depth += 1
        elif mark in ")]}>":
            depth -= 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


@cache
def _marks(separator: str) -> re.Pattern[str]:
    """Strings and arrows, which are skipped; brackets; and the beginnings of separators."""
    string = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)'
    return re.compile(rf"{string}|(?={re.escape(separator)})|->|[<>()\[\]{{}}]", re.DOTALL)


_NOTED = re.compile(r'"|//|(?:(?<=[ ,(])|\A)loc\(')
_USUAL = re.compile(r'((?:[^"/l]|l(?!oc\())*) loc\((#\w*)\)\Z')  # one location, at the end, and no strings


def take_locations(line: str) -> tuple[str, str]:
    """Removes every ` loc(...)` of a line, outside strings; the last one is the op's own."""
    if usual := _USUAL.match(line):
        return usual[1].strip(), usual[2]
    out, loc, i, start = [], "unknown", 0, 0
    while found := _NOTED.search(line, i):
        i = found.start()
        if line[i] == '"':
            m = STRING.match(line, i)
            i = m.end() if m else len(line)
        elif line[i] == "/":
            out.append(line[start:i])
            return "".join(out).strip(), loc
        else:
            end = closing(line, i + 4)
            loc = line[i + 4 : end - 1]
            out.append(line[start:i].rstrip(" "))
            i = start = end
    out.append(line[start:])
    return "".join(out).strip(), loc


_PLAIN = re.compile(r'[^"{<]+')


def attributes_of(body: str) -> tuple[str, dict[str, str]]:
    """Cuts the dictionaries `{...}` and `<{...}>` out of an op's body; `key = word` pairs beside them count too."""
    attributes: dict[str, str] = {}
    rest = ""
    i = 0
    while i < len(body):
        if plain := _PLAIN.match(body, i):
            rest += plain[0]
            i = plain.end()
            continue
        if body[i] == '"':
            m = STRING.match(body, i)
            end = m.end() if m else len(body)
            rest += body[i:end]
            i = end
        elif body[i] == "{" or body.startswith("<{", i):
            opened = i + (1 if body[i] == "{" else 2)
            depth, j = 1, opened
            while depth:
                if body[j] == '"':
                    m = STRING.match(body, j)
                    j = m.end() if m else len(body)
                    continue
                depth += (body[j] == "{") - (body[j] == "}")
                j += 1
            for item in split_top(body[opened : j - 1]):
                key, eq, value = item.partition(" = ")
                attributes[key.strip()] = value.strip() if eq else "true"
            i = j + (1 if body[i] == "<" and body.startswith(">", j) else 0)
        else:
            rest += body[i]
            i += 1
    for m in re.finditer(r"\b(\w+) = ([\w.\-]+)", rest):
        attributes.setdefault(m[1], m[2])
    return rest, attributes


# --- MLIR locations: `#loc12 = loc("kernel.py":43:11)` and the nested forms, resolved to source lines on demand -------

_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):\d+(?: to .*)?$')
_NAMED = re.compile(r'^"(?:[^"\\]|\\.)*"\((.*)\)$', re.S)
_LIBRARY = re.compile(r"[/\\]triton[/\\](language|runtime|compiler|experimental)[/\\]")


@dataclass(slots=True)
class Locations:
    """The `#loc` table of one module."""

    table: dict[str, str] = field(default_factory=dict)
    _frames: dict[str, list[str]] = field(default_factory=dict)

    def frames(self, loc: str) -> list[str]:
        """Call stack of a location, innermost first, as `file:line` strings."""
        if loc not in self._frames:
            self._frames[loc] = self._found(loc)
        return self._frames[loc]

    def _found(self, loc: str) -> list[str]:
        for _ in range(64):  # MLIR cannot print a cycle, but the text may come from elsewhere
            loc = loc.strip()
            if loc.startswith("#"):
                loc = self.table.get(loc, "unknown")
                continue
            if m := _FILE.match(loc):
                return [f"{m[1]}:{m[2]}"]
            if loc.startswith("callsite("):
                body = loc[len("callsite(") : closing(loc, len("callsite(")) - 1]
                callee, _, caller = body.rpartition(" at ")
                return self.frames(callee) + self.frames(caller)
            if loc.startswith("fused"):
                first = loc[loc.find("[") + 1 :].split(",")[0].rstrip("] ")
                loc = first
                continue
            if m := _NAMED.match(loc):
                loc = m[1]
                continue
            return []
        return []

    def line(self, loc: str) -> str:
        """The user's source line: the innermost frame outside Triton's own library, with its callers."""
        frames = self.frames(loc)
        own = [f for f in frames if not _LIBRARY.search(f)] or frames
        unique = list(dict.fromkeys(own))
        return " called from ".join(unique) if unique else "unknown line"


# --- the op tree of a TTIR module -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Block:
    label: str
    args: list[str]
    ops: list[Op] = field(default_factory=list)


Region = list[Block]


@dataclass(slots=True)
class Op:
    """One operation. `body` is the text between name and types; `operands` are the values it reads, in order."""

    name: str
    results: list[str]
    operands: list[str]
    body: str
    in_types: list[Type]
    out_types: list[Type]
    attributes: dict[str, str]
    loc: str = "unknown"
    regions: list[Region] = field(default_factory=list)
    successors: list[tuple[str, list[str]]] = field(default_factory=list)
    bad_type: str = ""

    def integer(self, name: str, default: int | None = None) -> int:
        text = self.attributes.get(name)
        if text is None:
            if default is None:
                raise KeyError(f"{self.name} has no attribute {name}")
            return default
        return int(text.split(":")[0])

    def integers(self, name: str) -> tuple[int, ...]:
        """The integers of `array<i32: 1, 0>` or `[1, 0]`."""
        text = self.attributes.get(name, "")
        return tuple(int(x) for x in re.findall(r"-?\d+", re.sub(r"array<\w+:?|: *i\d+", "", text)))

    def dense(self, name: str) -> tuple[int, ...]:
        """The integers of `dense<[1, 4]> : tensor<2xi32>`, or `dense<4> : tensor<1xi32>`."""
        return tuple(int(x) for x in re.findall(r"\d+", self.attributes.get(name, "").partition(":")[0]))

    def flag(self, name: str) -> bool:
        return self.attributes.get(name, "false").startswith("true")

    @property
    def word(self) -> str:
        """The first bare word of the body: a comparison's predicate, an atomic's kind, an axis."""
        m = re.match(r"[\s(]*([A-Za-z_]\w*)", self.body)
        return m[1] if m else ""


@dataclass(slots=True)
class Func:
    name: str
    args: list[tuple[str, Type]]
    region: Region
    public: bool
    loc: str = "unknown"


@dataclass(slots=True)
class Module:
    funcs: dict[str, Func]
    locations: Locations

    @property
    def entry(self) -> Func:
        public = [f for f in self.funcs.values() if f.public]
        return (public or list(self.funcs.values()))[0]


def walk(region: Region) -> Iterator[Op]:
    """All ops of a region, including nested ones."""
    for block in region:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from walk(inner)


__all__ = ["Block", "Func", "Module", "Op", "Region", "parse", "walk"]

_SSA = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_OP = re.compile(r"^(?:((?:%[\w$.\-]+(?::\d+)?(?:, )?)+) = )?\"?([A-Za-z_][\w$]*(?:\.[\w$]+)+)\"?(.*)$", re.S)
_LABEL = re.compile(r"^(\^\w+)(?:\((.*)\))?:$", re.S)
_FUNC = re.compile(r"^tt\.func (?:(public|private) )?@(\"[^\"]*\"|[\w$.\-]+)\(")
_SUCCESSOR = re.compile(r"(\^\w+)(?:\(([^()]*)\))?")


@lru_cache(4096)
def _types(text: str, describes: bool) -> tuple[tuple[Type, ...], tuple[Type, ...], str]:
    """The types of operands and results, and one that is not known: `A, B -> C`, `A to B`, `(A, B) -> (C, D)`,
    `A * B -> C`, or one type for everything. `describes`: it makes a tensor descriptor."""
    before, arrow, after = _arrow(text)
    ins = [
        x
        for part in split_top(before.removeprefix("(").removesuffix(")") if before.startswith("(") else before)
        for x in part.split(" * ")
    ]
    outs = split_top(after[1:-1] if after.startswith("(") and after.endswith(")") else after) if arrow else ins[-1:]
    bad, found = "", ([], [])  # type: tuple[str, tuple[list[Type], list[Type]]]
    for source, target in zip((ins, outs), found, strict=True):
        for i, x in enumerate(source):
            if x.startswith("<"):  # the prefix is omitted where the op allows only one kind of type
                x = ("!tt.tensordesc" if describes and (i > 0 or source is outs) else "!tt.ptr") + x
            try:
                target.append(parse_type(x))
            except (KeyError, ValueError):
                bad = x
    return tuple(found[0]), tuple(found[1]), bad


def _arrow(text: str) -> tuple[str, bool, str]:
    for mark in (" -> ", " to "):
        pieces = split_top(" " + text + " ", mark) if mark in text else ()
        if len(pieces) == 2:
            return pieces[0], True, pieces[1]
    if text.startswith("() -> "):
        return "", True, text[6:].strip()
    return text.strip(), False, ""


class _Reader:
    def __init__(self, text: str, kernel: str) -> None:
        self.kernel = kernel
        self.locations = Locations()
        self.lines: list[tuple[str, str]] = []
        for raw in text.splitlines():
            line = raw.strip()
            if line.startswith("#loc"):
                name, _, value = line.partition(" = ")
                value = value.strip()
                end = len(value) if value.endswith(")") else closing(value, 4)
                self.locations.table[name.strip()] = value[4 : end - 1]
            elif line and not line.startswith("//"):
                self.lines.append(take_locations(line))
        self.pos = 0

    def fail(self, what: str, loc: str) -> UnsupportedOpError:
        line = self.locations.line(loc)
        text = f"kernel {self.kernel}, {line}: cannot read TTIR: {what}"
        return UnsupportedOpError(text, kernel=self.kernel, field="ttir", line=line)

    def module(self) -> Module:
        funcs: dict[str, Func] = {}
        while self.pos < len(self.lines):
            line, _ = self.lines[self.pos]
            m = _FUNC.match(line)
            self.pos += 1
            if not m or not line.endswith("{"):
                continue
            end = closing(line, m.end())
            args = []
            for arg in split_top(line[m.end() : end - 1]):
                name, _, spec = arg.partition(":")
                args.append((name.strip(), self.type(re.sub(r"\{.*\}", "", spec, flags=re.S).strip(), "unknown")))
            region = self.region(Block("^bb0", []))
            _, loc = self.lines[self.pos]
            self.pos += 1
            name = m[2].strip('"')
            funcs[name] = Func(name, args, region, m[1] != "private", loc)
        if not funcs:
            raise UnsupportedOpError(
                f"kernel {self.kernel}: the text holds no tt.func; pass the TTIR of triton.compile",
                kernel=self.kernel, op="tt.func",
            )
        return Module(funcs, self.locations)

    def type(self, text: str, loc: str) -> Type:
        try:
            return parse_type(text)
        except (KeyError, ValueError):
            raise self.fail(f"unknown type {text!r}", loc) from None

    def region(self, first: Block) -> Region:
        """Blocks up to the line that closes the region, which is left unread."""
        blocks = [first]
        while True:
            if self.pos >= len(self.lines):
                raise self.fail("the text ends inside a region; pass the complete TTIR", "unknown")
            line, loc = self.lines[self.pos]
            if line.startswith("}"):
                return blocks
            if m := _LABEL.match(line):
                self.pos += 1
                block = Block(m[1], _SSA.findall(re.sub(r": *[^,]*<[^>]*>+", "", m[2] or "")))
                if blocks[-1] is first and not first.ops and not first.args:
                    blocks = [block]
                else:
                    blocks.append(block)
            else:
                blocks[-1].ops.append(self.op(line, loc))

    def op(self, line: str, loc: str) -> Op:
        self.pos += 1
        m = _OP.match(line)
        if not m:
            raise self.fail(f"{line!r}", loc)
        name, rest = m[2], m[3]
        results: list[str] = []
        for group in (m[1] or "").split(", "):
            first, colon, count = group.partition(":")
            results += [f"{first}#{i}" for i in range(int(count))] if colon else [first] if first else []
        opens = rest.endswith("{")
        if opens:
            rest = rest[:-1].rstrip().removesuffix("(").rstrip()
        if name == "scf.for":
            return self.loop(name, results, rest)
        pieces = split_top(rest, " : ")
        body, types = (" : ".join(pieces[:-1]), pieces[-1]) if len(pieces) > 1 else (rest, "")
        if rest.startswith(" : "):
            body = ""
        if name == "scf.if":
            body, _, types = rest.partition(" -> ")
            types = "() -> " + types if types else ""
        op = Op(name, results, [], body, [], [], {}, loc)
        self.operands(op, body)
        if not opens:
            self.types(op, types)
            return op
        first = Block("", [])
        if name == "scf.while":
            pairs = re.findall(r"(%[\w$.\-]+) = (%[\w$.\-]+(?:#\d+)?)", body)
            first.args, op.operands = [a for a, _ in pairs], [b for _, b in pairs]
        op.regions.append(self.region(first))
        while re.match(r"^\}(?: (?:else|do)|,) \{$", self.lines[self.pos][0]):
            self.pos += 1
            op.regions.append(self.region(Block("", [])))
        tail, op.loc = self.lines[self.pos]
        self.pos += 1
        pieces = split_top(tail.lstrip("})").strip(), ": ") if ": " in tail else []
        if pieces and tail.lstrip("})").strip():
            types = pieces[-1]
        self.types(op, types)
        return op

    def operands(self, op: Op, body: str) -> None:
        if op.name in ("cf.br", "cf.cond_br", "cf.switch"):
            full = body
            op.successors = [(m[1], _SSA.findall((m[2] or "").split(":")[0])) for m in _SUCCESSOR.finditer(full)]
            op.operands = _SSA.findall(full.partition("^")[0])
            return
        op.body, op.attributes = attributes_of(body)
        op.operands = _SSA.findall(STRING.sub('""', op.body))

    def types(self, op: Op, text: str) -> None:
        """Sets the types of an op's operands and results."""
        if not text or op.successors or op.name == "cf.switch":
            return
        ins, outs, bad = _types(text, op.name == "tt.make_tensor_descriptor")
        op.in_types, op.out_types = list(ins), list(outs) if op.results else []
        op.bad_type = bad or op.bad_type

    def loop(self, name: str, results: list[str], rest: str) -> Op:
        m = re.match(
            r"^ (?:unsigned )?(%\S+) = (%\S+) to (%\S+) step (%\S+)"
            r"(?: iter_args\((.*?)\) -> \((.*)\))?(?: +: (\w+))?$",
            rest,
            re.S,
        )
        if not m:
            raise self.fail(f"scf.for{rest}", "unknown")
        pairs = re.findall(r"(%[\w$.\-]+) = (%[\w$.\-]+(?:#\d+)?)", m[5] or "")
        op = Op(name, results, [m[2], m[3], m[4], *(b for _, b in pairs)], rest, [], [], {}, "unknown")
        if "unsigned" in rest.split("%")[0]:
            op.attributes["unsigned"] = "true"
        op.out_types = [self.type(t, "unknown") for t in split_top(m[6] or "")]
        op.in_types = [self.type(m[7] or "i32", "unknown")]
        op.regions.append(self.region(Block("", [m[1], *(a for a, _ in pairs)])))
        tail, op.loc = self.lines[self.pos]
        self.pos += 1
        _, attributes = attributes_of(tail[1:])
        op.attributes.update(attributes)
        return op


def parse(text: str, kernel: str = "") -> Module:
    """Reads one TTIR module.

    >>> module = parse("module {\\n tt.func public @k(%n: i32) {\\n %0 = arith.addi %n, %n : i32\\n tt.return\\n }\\n}")
    >>> [op.name for op in module.entry.region[0].ops]
    ['arith.addi', 'tt.return']
    """
    return _Reader(text, kernel or "?").module()
