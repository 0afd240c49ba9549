"""Renders the few Helm constructs that our chart uses, and refuses all others, since the tests have no Helm."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

_TAG = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.S)


def render(text: str, values: dict[str, Any], release: str = "demo") -> str:
    scope = {"Values": values, "Release": {"Name": release}}
    pieces: list[Any] = []
    at = 0
    for found in _TAG.finditer(text):
        before = text[at : found.start()]
        pieces.append(before.rstrip() if found[1] else before)
        pieces.append((found[2],))
        at = found.end()
        if found[3]:
            at += len(text[at:]) - len(text[at:].lstrip())
    return _run([*pieces, text[at:]], scope, {})


def _run(pieces: list[Any], scope: dict[str, Any], variables: dict[str, Any]) -> str:
    out, k = [], 0
    while k < len(pieces):
        piece = pieces[k]
        if isinstance(piece, str):
            out.append(piece)
        elif piece[0].startswith(("if ", "range ")):
            depth, end = 1, k + 1
            while depth:
                if isinstance(pieces[end], tuple):
                    depth += pieces[end][0].startswith(("if ", "range ")) - (pieces[end][0] == "end")
                end += 1
            inner = pieces[k + 1 : end - 1]
            if piece[0].startswith("if "):
                out.append(_run(inner, scope, variables) if _value(piece[0][3:], scope, variables) else "")
            else:
                name, number = re.fullmatch(r"range (\$\w+) := until \(int (\S+)\)", piece[0]).groups()
                for each in range(int(_value(number, scope, variables))):
                    out.append(_run(inner, scope, {**variables, name: each}))
            k = end - 1
        else:
            out.append(str(_value(piece[0], scope, variables)))
        k += 1
    return "".join(out)


def _value(expression: str, scope: dict[str, Any], variables: dict[str, Any]) -> Any:
    path, *filters = [part.strip() for part in expression.split("|")]
    if path.startswith("not "):
        return not _value(path.removeprefix("not "), scope, variables)
    if added := re.fullmatch(r"add (\S+) (\d+)", path):
        return _value(added[1], scope, variables) + int(added[2])
    if path in variables:
        found: Any = variables[path]
    else:
        found = scope
        for name in re.fullmatch(r"\$?\.([\w.]+)", path)[1].split("."):
            found = found[name]
    for each in filters:
        if each == "quote":
            found = json.dumps(str(found))
        elif each == "toJson":
            found = json.dumps(found)
        elif each == "sha256sum":
            found = hashlib.sha256(str(found).encode()).hexdigest()
        elif indent := re.fullmatch(r"indent (\d+)", each):
            found = "\n".join(" " * int(indent[1]) + line for line in str(found).splitlines())
        else:
            raise ValueError(f"no filter {each!r}")
    return found
