"""Why a policy does not compile, in words: Numba's reasons are written for those who know Numba."""

from __future__ import annotations

import re
import textwrap

from numba.core.errors import NumbaError

_LONGEST = 300
_RETURNS = re.compile(r"No conversion from (.+?) to \w+ for '\$\w*return_value")
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
    r"Literal\[int\].*|u?int\d+|float\d+": "a number",
}


def reason(error: NumbaError, needed: str) -> str:
    """What is wrong, to be read after the function's name; `needed` is what it must return.

    >>> reason(NumbaError("No conversion from none to float64 for '$6return_value.1', defined at None"), "a number")
    'returns None where a number is needed'
    """
    text = str(error)
    line = getattr(getattr(error, "loc", None), "line", None)
    at = f" in line {line}" if line else ""
    if found := _RETURNS.search(text):
        return f"returns {_in_words(found[1])}{at} where {needed} is needed"
    if found := _TWO_KINDS.search(text):
        return f"has {_in_words(found[1])} in one case and {_in_words(found[2])} in another{at}"
    if found := _APPLIES.search(text):
        return f"applies `{found[1]}`{at} to what is not a number"
    return f"cannot be compiled{at}: {_without_source(text)}"


def _in_words(kind: str) -> str:
    return next((words for pattern, words in _WORDS.items() if re.fullmatch(pattern, kind)), kind)


def _without_source(text: str) -> str:
    """Numba's text as far as the first line of the function's source, and without its advice, which is about Numba."""
    kept = []
    for line in text.splitlines():
        if line.startswith('File "'):
            break
        if line.strip() and not line.startswith(("Failed in nopython", "This error may", "To see", "During:")):
            kept.append(line)
    return textwrap.shorten(" ".join(kept), _LONGEST, placeholder=" …")
