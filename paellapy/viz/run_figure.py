"""`r.plot()`: latencies of each model of a run, and the use of the GPU over time (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.sim.results import Results
from paellapy.viz.needs import need
from paellapy.viz.palette import OKABE_ITO

_DASHES = ("-", "--", ":", "-.")  # beyond the palette, colours repeat with the next line style


def plot_run(results: Results, axes: Any = None) -> Any:
    """Latency distributions per model, and occupancy over time; the matplotlib figure."""
    if axes is None:
        _, axes = need("matplotlib.pyplot", "plot()").subplots(1, 2, figsize=(11, 4), layout="constrained")
    left, right = axes
    for number, each in enumerate(results.models):
        jobs = results.jobs[(results.jobs["model"] == number) & (results.jobs["status"] == OK)]
        if len(jobs):
            ms = np.sort((jobs["finish_ns"] - jobs["arrival_ns"]) / 1e6)
            left.plot(ms, np.arange(1, len(ms) + 1) / len(ms), label=each.name, **_style(number))
    left.set(xscale="log", xlabel="latency, ms", ylabel="share of requests")
    left.set_title(f"{results.policy}, {results.device}")
    if left.get_lines():
        left.legend(fontsize="small")
    time_ms = (np.arange(len(results.occupancy)) + 0.5) * results.bin_ms
    for column, label in enumerate(("block slots", "memory bandwidth", "kernel issue")):
        right.plot(time_ms, results.occupancy[:, column], label=label, linewidth=1, **_style(column))
    # Shares reach 1, so the legend is above them.
    right.set(xlabel="time, ms", ylabel="share in use", ylim=(0, 1.18), yticks=np.linspace(0, 1, 6), title="occupancy")
    right.legend(fontsize="small", loc="upper center", ncols=3, frameon=False)
    return left.figure


def plot_runs(runs: Sequence[Results]) -> Any:
    """Several runs, one below the other; latencies share an axis, so that policies can be compared."""
    if len(runs) == 1:
        return plot_run(runs[0])
    pyplot = need("matplotlib.pyplot", "plot()")
    figure, axes = pyplot.subplots(len(runs), 2, figsize=(11, 3.2 * len(runs)), layout="constrained", sharex="col")
    for each, pair in zip(runs, axes, strict=True):
        plot_run(each, pair)
    for above in axes[:-1].flat:
        above.set_xlabel("")
    return figure


def _style(number: int) -> dict[str, str]:
    again, at = divmod(number, len(OKABE_ITO))
    return {"color": OKABE_ITO[at], "linestyle": _DASHES[again % len(_DASHES)]}
