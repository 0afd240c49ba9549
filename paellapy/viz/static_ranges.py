"""The ranges of kernels in pictures for papers (matplotlib): the view "ranges" of `save_figure`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import TraceError
from paellapy.viz.data import Picture
from paellapy.viz.needs import need
from paellapy.viz.palette import colours, further_colours
from paellapy.viz.ranges_view import depth_of, lane_name, shown_slices

_HEIGHTS = (0.8, 0.55, 0.3)  # of a range, of one inside it, and of all further inside
_MOST_LABELS = 48


def check_ranges(pictures: Sequence[Picture]) -> None:
    if len(pictures) > 1:
        raise TraceError("the view 'ranges' shows one trace: save a figure of each")
    shown_slices(pictures[0].trace, None)


def ranges_view(picture: Picture, ax: Any, sms: tuple[int, int] | None) -> None:
    """A lane for each block resident at a time, or for each warp, on the first SMs that have ranges, or on `sms`."""
    trace = picture.trace
    slices = shown_slices(trace, None if sms is None else range(sms[0], sms[1] + 1))
    lanes = {lane: i for i, lane in enumerate(sorted({s.lane for s in slices}))}
    tone = range_colours([picture])
    height = {name: _HEIGHTS[min(depth_of(trace, i), 2)] for i, name in enumerate(trace.ranges.names)}
    start, end = (np.array([getattr(s, at) for s in slices], np.int64) for at in ("start_ns", "end_ns"))
    for name in trace.ranges.names:
        mine = np.array([s.name == name for s in slices], np.bool_)
        middle = np.array([lanes[s.lane] for s in slices if s.name == name], np.float64)
        boxes(picture, ax, start[mine], end[mine], middle, height[name], [tone[name]] * len(middle))
    shown = list(lanes)[:: -(-len(lanes) // _MOST_LABELS)]
    ax.set_yticks([lanes[lane] for lane in shown], [lane_name(*lane) for lane in shown])
    ax.set(ylabel="ranges", ylim=(len(lanes) - 0.5, -0.5))


def range_colours(pictures: Sequence[Picture]) -> dict[str, str]:
    """Other colours than those of the kernels in other views."""
    named = [name for p in pictures for name in p.trace.ranges.names]
    return further_colours(named, colours(name for p in pictures for name in p.groups.names).values())


def boxes(
    picture: Picture,
    ax: Any,
    start_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    middle: NDArray[np.float64],
    height: float,
    paint: list[str],
) -> None:
    """Bars over time, each in its own colour."""
    collections = need("matplotlib.collections", "a picture")
    left, right = picture.axis.of(start_ns), picture.axis.of(end_ns)
    low, high = middle - height / 2, middle + height / 2
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    shapes = collections.PolyCollection(corners, facecolors=paint, linewidths=0)
    shapes.set_snap(False)  # lanes thinner than a pixel become paler, instead of a whole pixel or none
    ax.add_collection(shapes)
