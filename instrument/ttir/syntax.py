"""Pieces of MLIR syntax: brackets, strings, attribute dictionaries, location suffixes."""

from __future__ import annotations

import re

STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


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
    """Split at separators outside brackets and strings; empty parts are dropped."""
    parts, depth, start, i, quoted = [], 0, 0, 0, False
    while i < len(text):
        c = text[i]
        if quoted:
            if c == "\\":
                i += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "<([{":
            depth += 1
        elif c in ")]}" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            start = i + len(separator)
        i += 1
    parts.append(text[start:])
    return [p.strip() for p in parts if p.strip()]


def take_locations(line: str) -> tuple[str, str]:
    """Remove every ` loc(...)` of a line, outside strings; the last one is the op's own."""
    out, loc, i, start = [], "unknown", 0, 0
    while i < len(line):
        if line[i] == '"':
            m = STRING.match(line, i)
            i = m.end() if m else len(line)
        elif line.startswith("loc(", i) and (i == 0 or line[i - 1] in " ,("):
            end = closing(line, i + 4)
            loc = line[i + 4 : end - 1]
            out.append(line[start:i].rstrip(" "))
            i = start = end
        elif line.startswith("//", i):
            out.append(line[start:i])
            return "".join(out).strip(), loc
        else:
            i += 1
    out.append(line[start:])
    return "".join(out).strip(), loc


def attributes_of(body: str) -> tuple[str, dict[str, str]]:
    """Cut the dictionaries `{...}` and `<{...}>` out of an op's body; `key = word` pairs beside them count too."""
    attributes: dict[str, str] = {}
    rest = ""
    i = 0
    while i < len(body):
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
