"""TTIR text to a tree of ops.

TTIR prints one op per line: a region opens with `{` at a line's end and closes on a line that starts with `}`. Every op
keeps its location. The same code reads the text of Triton 3.6 to 3.9."""

from __future__ import annotations

import re

from paellapy.instrument.errors import UnsupportedOpError
from paellapy.instrument.ttir.locations import Locations
from paellapy.instrument.ttir.syntax import STRING, attributes_of, closing, split_top, take_locations
from paellapy.instrument.ttir.tree import Block, Func, Module, Op, Region, walk
from paellapy.instrument.ttir.types import Type, parse_type

__all__ = ["Block", "Func", "Module", "Op", "Region", "parse", "walk"]

_SSA = re.compile(r"%[\w$.\-]+(?:#\d+)?")
_OP = re.compile(r"^(?:((?:%[\w$.\-]+(?::\d+)?(?:, )?)+) = )?\"?([A-Za-z_][\w$]*(?:\.[\w$]+)+)\"?(.*)$", re.S)
_LABEL = re.compile(r"^(\^\w+)(?:\((.*)\))?:$", re.S)
_FUNC = re.compile(r"^tt\.func (?:(public|private) )?@(\"[^\"]*\"|[\w$.\-]+)\(")
_SUCCESSOR = re.compile(r"(\^\w+)(?:\(([^()]*)\))?")


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
                self.locations.table[name.strip()] = value[4 : closing(value, 4) - 1]
            elif line and not line.startswith("//"):
                self.lines.append(take_locations(line))
        self.pos = 0

    def fail(self, what: str, loc: str) -> UnsupportedOpError:
        return UnsupportedOpError(f"kernel {self.kernel}, {self.locations.line(loc)}: cannot read TTIR: {what}")

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
                f"kernel {self.kernel}: the text holds no tt.func; pass the TTIR of triton.compile"
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
        """`A, B -> C`, `A to B`, `(A, B) -> (C, D)`, `A * B -> C`, or one type for everything."""
        if not text or op.successors or op.name == "cf.switch":
            return
        before, arrow, after = self.arrow(text)
        ins = [
            x
            for part in split_top(before.removeprefix("(").removesuffix(")") if before.startswith("(") else before)
            for x in part.split(" * ")
        ]
        outs = split_top(after[1:-1] if after.startswith("(") and after.endswith(")") else after) if arrow else ins[-1:]
        for source, target in ((ins, op.in_types), (outs, op.out_types)):
            for i, x in enumerate(source):
                if x.startswith("<"):  # the prefix is omitted where the op allows only one kind of type
                    last = op.name == "tt.make_tensor_descriptor" and (i > 0 or target is op.out_types)
                    x = ("!tt.tensordesc" if last else "!tt.ptr") + x
                try:
                    target.append(parse_type(x))
                except (KeyError, ValueError):
                    op.bad_type = x
        if not op.results:
            op.out_types = []

    @staticmethod
    def arrow(text: str) -> tuple[str, bool, str]:
        for mark in (" -> ", " to "):
            pieces = split_top(" " + text + " ", mark)
            if len(pieces) == 2:
                return pieces[0], True, pieces[1]
        if text.startswith("() -> "):
            return "", True, text[6:].strip()
        return text.strip(), False, ""

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
