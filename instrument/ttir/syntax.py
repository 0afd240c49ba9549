"""Pieces of MLIR syntax: brackets, strings, attribute dictionaries, location suffixes."""

from __future__ import annotations

import re
from functools import cache

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


def take_locations(line: str) -> tuple[str, str]:
    """Removes every ` loc(...)` of a line, outside strings; the last one is the op's own."""
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
