"""Statements of PTX: text into tokens, which keep the white space before them, and tokens into statements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from paellapy.instrument.errors import PtxError

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
        if found["text"] == '"':
            raise PtxError(f"unterminated string in PTX at line {text.count(chr(10), 0, found.start('text')) + 1}")
        if found["text"] == "/" and text.startswith("/*", found.start("text")):
            raise PtxError(f"unterminated comment in PTX at line {text.count(chr(10), 0, found.start('text')) + 1}")
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
            raise PtxError("the PTX module ends inside a statement: pass the complete text")
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
