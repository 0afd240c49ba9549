"""Fits text into a matplotlib figure: measures it, breaks it into lines, shortens it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paellapy.viz.data import short
from paellapy.viz.needs import need

POINTS = 72  # per inch
SMALLEST = 6.0  # points: the smallest size that journals accept


def font_size(size_inches: tuple[float, float], views: int) -> float:
    """10 points if there is room, less in a paper's column."""
    width, height = size_inches
    return max(SMALLEST, min(10.0, 10 * width / 6, 10 * height / (1.9 * views)))


def width_of(text: str, size: float, weight: str = "normal") -> float:
    """Width in points of the longest line."""
    fonts, paths = need("matplotlib.font_manager", "a picture"), need("matplotlib.textpath", "a picture")
    font = fonts.FontProperties(size=size, weight=weight)
    measure = paths.text_to_path.get_text_width_height_descent
    return max(float(measure(line, font, ismath=False)[0]) for line in text.split("\n"))


def wrapped(text: str, size: float, most: float) -> str:
    """The text in lines of at most `most` points, broken between words."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for word in line.split(" "):
            longer = f"{lines[-1]} {word}" if lines[-1] else word
            if lines[-1] and width_of(longer, size) > most:
                lines.append(word)
            else:
                lines[-1] = longer
    return "\n".join(lines)


# Lengths in a legend as multiples of its font size: matplotlib's own, with a narrower handle.
HANDLE, AFTER_HANDLE, BETWEEN, LINE = 1.6, 0.6, 1.6, 1.5


def legend_columns(names: Sequence[str], size: float, most: float) -> int:
    """The largest number of columns, filled one after another, that fit into `most` points; at least 1."""
    widths = [width_of(name, size) + (HANDLE + AFTER_HANDLE) * size for name in names]
    for n in range(len(names), 1, -1):
        rows, longer = divmod(len(names), n)
        starts = [c * rows + min(c, longer) for c in range(n + 1)]
        columns = (max(widths[a:b]) for a, b in pairwise(starts))
        if sum(columns) + (n - 1) * BETWEEN * size <= most:
            return n
    return 1


def legend_names(names: Sequence[str], size: float, most: float, high: float) -> tuple[list[str], int]:
    """The names, shortened until they fit into `most` points of width and `high` points of height but stay distinct;
    and the number of columns.
    """
    shown = [short(name) for name in names]
    columns = legend_columns(shown, size, most)
    for letters in (24, 16, 12):
        shorter = [short(name, letters) for name in names]
        fits = all(width_of(name, size) + (HANDLE + AFTER_HANDLE) * size <= most for name in shown)
        fits = fits and -(-len(names) // columns) * LINE * size <= high
        if fits or len({*shorter}) < len({*shown}):
            break
        shown, columns = shorter, legend_columns(shorter, size, most)
    return shown, columns


def fit_labels(figure: Any) -> None:
    """Breaks or cuts labels of vertical axes that are longer than their axis."""
    figure.draw_without_rendering()  # computes the layout
    for ax in figure.axes:
        label = ax.yaxis.label
        text, size = label.get_text(), label.get_size()
        room = ax.get_window_extent().height / figure.dpi * POINTS * 1.1
        lines = text.count("\n") + 1
        choices = (text, wrapped(text, size, room), text.split("\n")[0], text.split()[0].rstrip(",") if text else "")
        for choice in choices:
            if width_of(choice, size) <= room and choice.count("\n") < max(lines, 2):
                break
        label.set_text(choice)
