"""The picture of docs/results.md: one small panel for each system, with streams in grey in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

PANELS = {
    "streams, 32 queues": "#333333", "dynamic batcher": "#CC79A7", "srpt": "#0072B2", "slack": "#0072B2",
    "slack, windows": "#0072B2", "srpt, batches": "#D55E00", "slack, batches": "#D55E00", "hrrn, batches": "#009E73",
    "hrrn, batches, windows": "#009E73",
}  # fmt: skip
BASE, BASE_COLOUR = "streams", "#999999"
SIGMA = "1.5"
ROWS = (("within_4x", 100.0, "% within 4× alone"), ("p99_slowdown", 1.0, "p99 slowdown"))

Series = dict[tuple[str, ...], list[Any]]


def _draw(ax: Any, sweep: Series, system: str, which: str, scale: float, colour: str) -> None:
    rates = sorted(int(key[2]) for key in sweep if key[:2] == (system, SIGMA))
    values = [[p[which] * scale for p in sweep[system, SIGMA, str(rate)]] for rate in rates]
    ax.plot(rates, [np.median(v) for v in values], "o-", ms=2.5, lw=1.3, color=colour)
    low, high = [min(v) for v in values], [max(v) for v in values]
    ax.fill_between(rates, low, high, color=colour, alpha=0.2, lw=0)


def sweep_picture(sweep: Series, path: Path) -> None:
    """Load along the axis of all panels; above, the share in time, below, the p99 slowdown."""
    shown = [name for name in PANELS if any(key[:2] == (name, SIGMA) for key in sweep)]
    columns = 3
    blocks = -(-len(shown) // columns)
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 2.9 * blocks), layout="constrained")
        axes = figure.subplots(2 * blocks, columns, sharex=True, sharey="row", squeeze=False)
        for k, system in enumerate(shown):
            for row, (which, scale, label) in enumerate(ROWS):
                ax = axes[2 * (k // columns) + row, k % columns]
                _draw(ax, sweep, BASE, which, scale, BASE_COLOUR)
                _draw(ax, sweep, system, which, scale, PANELS[system])
                if k % columns == 0:
                    ax.set_ylabel(label)
                if row == 0:
                    ax.set(title=system, ylim=(0, 104))
                    ax.axhline(99, color="#bbbbbb", lw=0.7, ls=":")
                else:
                    ax.set(yscale="log", ylim=(1, 120))
                    ax.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
                    ax.minorticks_off()
        for ax in axes[-1]:
            ax.set_xticks([0, 5000, 10000, 15000])
            ax.set_xlabel("requests offered a second")
        for k in range(len(shown), blocks * columns):
            for row in (0, 1):
                axes[2 * (k // columns) + row, k % columns].set_axis_off()
        figure.savefig(path, dpi=150)
