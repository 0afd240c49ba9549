"""Explains in plain words why a policy does not compile: Numba's own messages assume knowledge of Numba."""

from __future__ import annotations

import linecache
import re
import textwrap
from typing import Any

from numba.core.errors import NumbaError

_LONGEST = 100
# The name contains the interpreter's instruction: `return_value`, or `return_const` in Python 3.12 and 3.13.
_RETURNS = re.compile(r"No conversion from (.+?) to \w+ for '\$[\w.]*(?:return_(?:value|const)|load_const)")
_RETURN_KINDS = re.compile(r"[cC]an'?t unify return type from the following types: (.+?)(?:\n|$)")
_NO_NAME = re.compile(r"NameError: (?:global )?name '(\w+)' is not defined|Untyped global name '(\w+)'")
_NO_ATTRIBUTE = re.compile(r"Unknown attribute '(\w+)' of type (.+)")
_APPLIES = re.compile(r"No implementation of function Function\(<(?:built-in )?function (\w+)")
_TWO_KINDS = re.compile(r"Cannot unify (.+?) and (.+?) for '")
_WORDS = {
    r"none|omitted\(.*": "None",
    r"Literal\[str\].*|unicode_type": "a str",
    r"Literal\[bool\].*|bool(ean)?": "True or False",
    r"(Uni)?Tuple.*": "a tuple",
    r"(reflected )?list.*": "a list",
    r".*[dD]ict.*": "a dict",
    r"complex.*": "a complex number",
    r"Record.*": "the job itself",
    r"[nN]ested[aA]rray.*": "numbers for every model",
    r"[aA]rray.*": "an array",
    r"Module.*": "the module",
    r"Literal\[int\].*|u?int\d+|float\d+": "a number",
}


def reason(error: NumbaError, needed: str, function: Any = None) -> str:
    """The reason, phrased to follow the function's name; `needed` is the kind of value it must return.

    An error without a known explanation is reported with the source line that caused it.

    >>> reason(NumbaError("No conversion from none to float64 for '$6return_value.1', defined at None"), "a number")
    'returns None where a number is needed'
    """
    text = str(error)
    line = getattr(getattr(error, "loc", None), "line", None)
    at = f" in line {line}" if line else ""
    if found := _RETURNS.search(text):
        return f"returns {_in_words(found[1])}{at} where {needed} is needed"
    if found := _TWO_KINDS.search(text):
        return f"has {_in_words(found[1])} in one case and {_in_words(found[2])} in another for the same variable{at}"
    if found := _APPLIES.search(text):
        return f"applies `{found[1]}`{at} to a value that is not a number, or to too few or too many values"
    if found := _RETURN_KINDS.search(text):
        kinds = sorted({_in_words(each.strip()) for each in _split(found[1])})
        return f"returns {' in one case and '.join(kinds)} in another, where {needed} is needed"
    if found := _NO_NAME.search(text):
        return f"uses the name `{found[1] or found[2]}`{at}, which is not available in compiled code"
    if found := _NO_ATTRIBUTE.search(text):
        return f"uses `.{found[1]}`{at}, which {_in_words(found[2].strip())} does not have"
    source = _line(function, line)
    return f"has code that cannot be compiled{at}" + (f", `{source}`" if source else "")


def _in_words(kind: str) -> str:
    return next((words for pattern, words in _WORDS.items() if re.fullmatch(pattern, kind)), "something else")


def _split(kinds: str) -> list[str]:
    """Splits at commas outside of brackets."""
    return re.split(r",\s*(?![^(\[]*[)\]])", kinds)


def _line(function: Any, line: int | None) -> str:
    if function is None or line is None:
        return ""
    return textwrap.shorten(linecache.getline(function.__code__.co_filename, line).strip(), _LONGEST, placeholder=" …")
