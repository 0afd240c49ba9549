"""The syntax tree of a function, from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType
from typing import Any

Function = ast.FunctionDef | ast.Lambda


def tree_of(function: Any) -> Function | None:
    """The function's syntax tree, with the lines of its file; None if its source cannot be read."""
    try:
        lines, first = inspect.getsourcelines(function)
        module = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # the source of a lambda inside an expression may not parse alone
        return None
    ast.increment_lineno(module, max(first, 1) - 1)
    code = function.__code__
    wanted = ast.Lambda if function.__name__ == "<lambda>" else ast.FunctionDef
    arguments = list(code.co_varnames[: code.co_argcount])
    found = [
        each
        for each in ast.walk(module)
        if isinstance(each, wanted) and [a.arg for a in each.args.args] == arguments and _makes(each, code)
    ]
    return found[0] if found else None


def _makes(tree: Function, code: CodeType) -> bool:
    """Whether the code may come from this tree: there may be two lambdas in one line."""
    if isinstance(tree, ast.FunctionDef):
        return tree.name == code.co_name
    return {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)} <= set(code.co_names)
