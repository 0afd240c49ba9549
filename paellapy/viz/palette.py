"""Colours that colour-blind readers can tell apart, on light and dark backgrounds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paellapy.instrument.env import install_line
from paellapy.instrument.errors import PaellaError, TraceError

Theme = Literal["light", "dark"]

# Okabe and Ito's palette without its black, the strongest contrasts first.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
# Further colours, for a picture that has used up the first ones: from Paul Tol's muted palette.
MORE = ("#999933", "#882255", "#AA4499", "#332288", "#117733")
OTHERS = "#999999"
WARNING = "#D55E00"
SCALE = "cividis"  # its lightness grows evenly, so that it also reads in grey


@dataclass(frozen=True, slots=True)
class Look:
    """A theme's values for plotly and for matplotlib."""

    plotly: str
    matplotlib: str
    ground: str
    ink: str


LOOKS: dict[str, Look] = {
    "light": Look("plotly_white", "default", "#ffffff", "#222222"),
    "dark": Look("plotly_dark", "dark_background", "#111111", "#e6e6e6"),
}


def look(theme: str) -> Look:
    if theme not in LOOKS:
        said = f"there is no theme {theme!r}: choose one of {', '.join(LOOKS)}"
        raise TraceError(said, field="theme", given=theme)
    return LOOKS[theme]


def colours(names: Iterable[str]) -> dict[str, str]:
    """One colour per name, in order; names beyond the palette are grey.

    >>> colours(["gemm", "add"])
    {'gemm': '#0072B2', 'add': '#E69F00'}
    """
    return {name: OKABE_ITO[i] if i < len(OKABE_ITO) else OTHERS for i, name in enumerate(dict.fromkeys(names))}


def further_colours(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Colours for a second kind of names, without the colours already taken.

    >>> further_colours(["bert"], taken=["#0072B2", "#CC79A7"])
    {'bert': '#56B4E9'}
    """
    used = set(taken)
    # From the middle of the palette on: the first kind of names takes its first colours in every picture.
    free = [each for each in (*OKABE_ITO[3:], *OKABE_ITO[:3], *MORE) if each not in used]
    return {name: free[i] if i < len(free) else OTHERS for i, name in enumerate(dict.fromkeys(names))}


def rgba(colour: str, alpha: float) -> str:
    """The colour in CSS notation, with an opacity.

    >>> rgba("#0072B2", 0.5)
    'rgba(0, 114, 178, 0.5)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def paler(colour: str, ground: str, share: float = 0.7) -> str:
    """A colour mixed with its background; it is opaque, since browsers leave gaps between transparent bars.

    >>> paler("#0072B2", "#ffffff")
    '#4c9cc9'
    """
    mixed = (share * int(colour[i : i + 2], 16) + (1 - share) * int(ground[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{int(value):02x}" for value in mixed)


# Imports the libraries of the extra `viz` when a picture is drawn.


class MissingExtraError(PaellaError, ImportError):
    """A library of an optional extra is not installed."""


def need(module: str, what: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        said = f"{what} needs {library}: {install_line('viz')}"
        raise MissingExtraError(said, library=library, extra="viz") from error
