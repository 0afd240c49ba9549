"""A PTX module as a tree that can be edited safely and printed back byte for byte.

Tokens keep the white space and comments before them, so an unedited module prints as it was read. The tree has the
parts that the passes need: functions, their parameters and directives, and bodies as flat lists of statements
(instructions with guard and opcode, labels, directives, braces). All else (globals, debug sections) is kept as is.

>>> m = Module.parse(".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry k() { ret; }")
>>> [f.name for f in m.entries()], str(m).endswith("{ ret; }")
(['k'], True)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from paellapy.instrument.errors import PtxError

# --- tokens, which keep the white space before them, and statements ---------------------------------------------------

_TOKEN = re.compile(
    r"""
    (?P<trivia>(?>(?:\s+|//[^\n]*|/\*.*?\*/)*))  # atomic: a token never starts with white space
    (?P<text>"(?:\\.|[^"\\])*"            # string
       |[%$.\w][\w$.]*                    # name, number, directive, opcode with its suffixes, %reg.x
       |::                                # scope in opcodes: .shared::cta
       |.)                                # punctuation
    """,
    re.X | re.S,
)
_TRIVIA = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)


class Kind(Enum):
    INSTRUCTION = "instruction"
    LABEL = "label"
    DIRECTIVE = "directive"
    OPEN = "{"
    CLOSE = "}"


@dataclass(slots=True)
class Token:
    trivia: str
    text: str

    def __str__(self) -> str:
        return self.trivia + self.text


@dataclass(slots=True)
class Statement:
    """One statement of a body. `tokens` is all of it; the other fields classify it."""

    kind: Kind
    tokens: list[Token]
    opcode: str = ""  # "@%p1 bra L" → "bra"; directives: ".reg"
    guard: str = ""  # "%p1", without "!"
    first_operand: int = 0  # index into tokens

    def __str__(self) -> str:
        return "".join(map(str, self.tokens))

    @property
    def label(self) -> str:
        return self.tokens[0].text if self.kind is Kind.LABEL else ""

    def operands(self) -> list[str]:
        """Texts of the operand tokens, without the closing semicolon."""
        return [t.text for t in self.tokens[self.first_operand : -1]]

    def is_op(self, *names: str) -> bool:
        """Whether this is an instruction whose opcode is one of `names`, with any suffixes."""
        return self.kind is Kind.INSTRUCTION and self.opcode.split(".", 1)[0] in names


def tokenize(text: str) -> tuple[list[Token], str]:
    """Splits text into tokens and the white space after the last one."""
    tokens: list[Token] = []
    at, end = 0, len(text)
    match = _TOKEN.match
    while at < end:
        found = match(text, at)
        if found is None:
            break
        if found["text"] == '"' or (found["text"] == "/" and text.startswith("/*", found.start("text"))):
            what = "string" if found["text"] == '"' else "comment"
            line = text.count("\n", 0, found.start("text")) + 1
            raise PtxError(f"unterminated {what} in PTX at line {line}", field=what, line=line)
        tokens.append(Token(found["trivia"], found["text"]))
        at = found.end()
    tail = _TRIVIA.fullmatch(text, at)
    assert tail is not None, "only white space and comments can follow the last token"
    return tokens, text[at:]


class Reader:
    """Reads statements from tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def done(self) -> bool:
        return self.at >= len(self.tokens)

    def peek(self, ahead: int = 0) -> str:
        i = self.at + ahead
        return self.tokens[i].text if i < len(self.tokens) else ""

    def take(self) -> Token:
        if self.done():
            raise PtxError("the PTX module ends inside a statement: pass the complete text", field="statement")
        self.at += 1
        return self.tokens[self.at - 1]

    def through(self, closer: str) -> list[Token]:
        """Takes tokens up to and including `closer`, skipping nested brackets."""
        taken: list[Token] = []
        depth = 0
        while True:
            token = self.take()
            taken.append(token)
            if depth == 0 and token.text == closer:
                return taken
            if token.text in ("(", "{", "["):
                depth += 1
            elif token.text in (")", "}", "]"):
                depth -= 1

    def statement(self) -> Statement:
        word = self.peek()
        if word == "{":
            return Statement(Kind.OPEN, [self.take()])
        if word == "}":
            return Statement(Kind.CLOSE, [self.take()])
        if word == ".loc":
            return Statement(Kind.DIRECTIVE, self._loc(), ".loc")
        if self.peek(1) == ":" and word not in ("@", ";"):
            return Statement(Kind.LABEL, [self.take(), self.take()])
        if word.startswith("."):
            return Statement(Kind.DIRECTIVE, self.through(";"), word)
        tokens: list[Token] = []
        guard = ""
        if word == "@":
            tokens.append(self.take())
            if self.peek() == "!":
                tokens.append(self.take())
            tokens.append(self.take())
            guard = tokens[-1].text
        tokens.append(self.take())
        opcode = tokens[-1].text
        while self.peek() == "::":  # ld.shared::cta.u32 reads as three tokens
            tokens += [self.take(), self.take()]
            opcode += "::" + tokens[-1].text
        first = len(tokens)
        if opcode != ";":
            tokens += self.through(";")
        return Statement(Kind.INSTRUCTION, tokens, opcode, guard, first)

    def _loc(self) -> list[Token]:
        taken = [self.take() for _ in range(4)]  # .loc file line column
        while self.peek() == ",":  # , function_name label [+ offset], inlined_at file line column
            taken += [self.take(), self.take()]
            if taken[-1].text == "function_name":
                taken.append(self.take())
                if self.peek() == "+":
                    taken += [self.take(), self.take()]
            else:
                taken += [self.take() for _ in range(3)]
        return taken


def statements(text: str) -> list[Statement]:
    """Parses a piece of a body, for insertion.

    >>> [s.opcode for s in statements("@%p bra L; L: ret;")]
    ['bra', '', 'ret']
    """
    tokens, _ = tokenize(text)
    reader = Reader(tokens)
    result = []
    while not reader.done():
        result.append(reader.statement())
    return result


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Function:
    """An `.entry` or `.func` with its pieces: head `(` params `)` directives `{` body `}`."""

    name: str
    is_entry: bool
    head: list[Token]  # linkage … name and "("; without parentheses, there is none
    params: list[list[Token]]  # one list per parameter, commas excluded
    after: list[Token]  # ")" and the directives after it; a declaration ends here with ";"
    body: list[Statement] | None  # from "{" to the matching "}", both included; None for a declaration

    def __str__(self) -> str:
        params = ",".join("".join(map(str, p)) for p in self.params)
        body = "".join(map(str, self.body or ()))
        return "".join(map(str, self.head)) + params + "".join(map(str, self.after)) + body

    def instructions(self) -> Iterator[Statement]:
        return (s for s in self.body or () if s.kind is Kind.INSTRUCTION)

    def param_names(self) -> list[str]:
        return [_param_name(p) for p in self.params]

    def add_param(self, declaration: str) -> None:
        """Appends one parameter, e.g. ".param .align 8 .b8 desc[64]"."""
        if not self.head or self.head[-1].text != "(":
            self.head.append(Token("", "("))
            self.after.insert(0, Token("\n", ")"))
        self.params.append(tokenize("\n\t" + declaration)[0])

    def drop_params(self, count: int) -> None:
        """Removes the last parameters."""
        del self.params[len(self.params) - count :]

    def directive(self, name: str) -> list[int] | None:
        """The integers after a performance directive such as ".reqntid", or None if it is absent."""
        for i, token in enumerate(self.after):
            if token.text == name:
                values: list[int] = []
                for follower in self.after[i + 1 :]:
                    if follower.text.isdigit():
                        values.append(int(follower.text))
                    elif follower.text != ",":
                        break
                return values
        return None

    def insert_prologue(self, text: str) -> None:
        """Inserts statements before the first label or instruction, after the leading declarations."""
        assert self.body is not None
        at = next(i for i, s in enumerate(self.body) if i and s.kind is not Kind.DIRECTIVE)
        self.body[at:at] = statements(text)

    def insert_after_first_loads(self, text: str) -> None:
        """Inserts statements after the last global load of the straight line with which the body begins.

        That line ends at the first label, branch, barrier or call; without a load in it, this is the prologue. Labels
        before its first instruction do not end it (they mark lines for debuggers), unless the body jumps there.
        """
        assert self.body is not None
        mentioned = {t.text for s in self.body if s.kind is not Kind.LABEL for t in s.tokens}
        best = at = next(i for i, s in enumerate(self.body) if i and s.kind is not Kind.DIRECTIVE)
        depth = 0
        reached_code = False
        for i, s in enumerate(self.body[at:], at):
            depth += (s.kind is Kind.OPEN) - (s.kind is Kind.CLOSE)
            leaves = s.is_op("bra", "brx", "bar", "barrier", "call", "ret", "exit", "trap")
            if depth < 0 or leaves or (s.kind is Kind.LABEL and (reached_code or s.label in mentioned)):
                break
            reached_code |= s.kind is Kind.INSTRUCTION
            if depth == 0 and s.is_op("ld", "cp") and ".global" in s.opcode:
                best = i + 1
        self.body[best:best] = statements(text)

    def insert_epilogue(self, text: str) -> None:
        """Inserts statements before the closing brace."""
        assert self.body is not None
        self.body[-1:-1] = statements(text)


@dataclass(slots=True)
class Module:
    items: list[Function | list[Token]] = field(default_factory=list)
    trailing: str = ""

    @classmethod
    def parse(cls, text: str) -> Module:
        tokens, trailing = tokenize(text)
        return cls(_ModuleReader(tokens).module_items(), trailing)

    def __str__(self) -> str:
        return "".join(str(i) if isinstance(i, Function) else "".join(map(str, i)) for i in self.items) + self.trailing

    def functions(self) -> list[Function]:
        return [i for i in self.items if isinstance(i, Function) and i.body is not None]

    def entries(self) -> list[Function]:
        return [f for f in self.functions() if f.is_entry]

    def entry(self, name: str | None = None) -> Function:
        found = [f for f in self.entries() if name is None or f.name == name]
        if len(found) != 1:
            names = ", ".join(f.name for f in self.entries()) or "none"
            wanted = "exactly one entry" if name is None else f"an entry named {name!r}"
            raise PtxError(f"the PTX module must have {wanted}; its entries are: {names}", field="entry", given=names)
        return found[0]

    def version(self) -> tuple[int, int]:
        """The PTX ISA version that the module asks for."""
        value = self._header(".version")
        found = re.fullmatch(r"(\d+)(?:\.(\d+))?", value, re.A)
        if found is None:
            raise PtxError(f"the PTX module has an unreadable version: .version {value}", field=".version", given=value)
        return int(found[1]), int(found[2] or 0)

    def target(self) -> str:
        return self._header(".target")

    def _header(self, name: str) -> str:
        for item in self.items:
            if isinstance(item, list) and item[0].text == name:
                return item[1].text
        raise PtxError(f"the PTX module has no {name} line: pass a complete module", field=name)


def _param_name(param: list[Token]) -> str:
    names = [t.text for t in param if not t.text.startswith(".") and (t.text[0].isalpha() or t.text[0] in "_$%")]
    return names[-1] if names else ""


# Module-level lines that end where the next item begins, not with a semicolon.
_HEADER_WORDS = {".version": 1, ".address_size": 1}
_FUNCTION_WORDS = {".visible", ".weak", ".extern", ".common", ".entry", ".func", ".noreturn"}


class _ModuleReader(Reader):
    def module_items(self) -> list[Function | list[Token]]:
        items: list[Function | list[Token]] = []
        while not self.done():
            items.append(self.function() if self._at_function() else self._raw_item())
        return items

    def _at_function(self) -> bool:
        ahead = 0
        while self.peek(ahead) in _FUNCTION_WORDS:
            if self.peek(ahead) in (".entry", ".func"):
                return True
            ahead += 1
        return False

    def _raw_item(self) -> list[Token]:
        word = self.peek()
        if word in _HEADER_WORDS:
            return [self.take() for _ in range(1 + _HEADER_WORDS[word])]
        if word in (".target", ".file", ".loc"):
            taken = [self.take(), self.take()]
            # .target a, b — .file 1 "name", time, size
            while self.peek() == "," or self.peek().startswith('"') or taken[-1].text == ",":
                taken.append(self.take())
            return taken
        if word == ".section":
            taken = [self.take(), self.take()]
            if self.peek() == "{":
                taken.append(self.take())
                taken += self.through("}")
            return taken
        if word.endswith(":") or self.peek(1) == ":":
            return [self.take(), self.take()]
        return self.through(";")

    def function(self) -> Function:
        head: list[Token] = []
        is_entry = False
        while self.peek() in _FUNCTION_WORDS:
            is_entry |= self.peek() == ".entry"
            head.append(self.take())
        while self.peek() == "(" or self.peek().startswith("."):  # returned parameters, .attribute(…)
            token = self.take()
            head.append(token)
            if token.text == "(":
                head += self.through(")")
        name = self.take()
        head.append(name)
        params: list[list[Token]] = []
        after: list[Token] = []
        if self.peek() == "(":
            head.append(self.take())
            params, closer = self._params()
            after.append(closer)
        while self.peek() not in ("{", ";"):
            after += self.through(";") if self.peek() == ".pragma" else [self.take()]
        if self.peek() == ";":
            after.append(self.take())
            return Function(name.text, is_entry, head, params, after, None)
        return Function(name.text, is_entry, head, params, after, self._body())

    def _params(self) -> tuple[list[list[Token]], Token]:
        params: list[list[Token]] = []
        current: list[Token] = []
        while True:
            token = self.take()
            if token.text == ")":
                if current or params:
                    params.append(current)
                return params, token
            if token.text == ",":
                params.append(current)
                current = []
            else:
                current.append(token)

    def _body(self) -> list[Statement]:
        body = [self.statement()]
        depth = 1
        while depth:
            statement = self.statement()
            depth += (statement.kind is Kind.OPEN) - (statement.kind is Kind.CLOSE)
            body.append(statement)
        return body
