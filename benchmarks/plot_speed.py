"""Time to build all views of 100,000 blocks on 132 SMs, to draw them in a browser, and to zoom into a live one.

python benchmarks/plot_speed.py [--blocks 100000]
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, save, show

import paellapy as pp
from paellapy.instrument.records import BLOCK, LAUNCH
from paellapy.instrument.traces.trace import DeviceFacts

ROUNDS = 5
# Plotly itself is there before, as in a notebook.
DRAW = """(async () => {
  const shown = document.querySelector('.js-plotly-plot'), place = document.createElement('div');
  document.body.append(place);
  const began = performance.now();
  await Plotly.newPlot(place, shown.data, shown.layout);
  return performance.now() - began;
})()"""


def waves(blocks: int, n_sm: int = 132, per_sm: int = 8, kernels: int = 3) -> pp.Trace:
    """Kernels one after the other, `per_sm` blocks of 1 to 3 µs at a time on each SM, none of them idle."""
    slots = n_sm * per_sm
    rounds = -(-blocks // slots)
    kernel = np.arange(blocks) * kernels // blocks
    duration = np.zeros(rounds * slots, np.int64)
    duration[:blocks] = np.random.default_rng(0).integers(32, 96, blocks) * 32
    end = np.cumsum(duration.reshape(rounds, slots), axis=0).ravel()
    rows, launches = np.zeros(blocks, BLOCK), np.zeros(kernels, LAUNCH)
    rows["launch"], rows["kernel"], rows["block"] = kernel + 1, kernel, np.arange(blocks)
    rows["sm"] = np.arange(blocks) % slots % n_sm
    rows["start_ns"], rows["end_ns"] = (end - duration)[:blocks], end[:blocks]
    launches["launch"], launches["kernel"] = np.arange(kernels) + 1, np.arange(kernels)
    launches["warps"], launches["registers"], launches["blocks"] = 8, 32, np.bincount(kernel)
    return pp.Trace(rows, launches, [f"kernel_{k}" for k in range(kernels)], DeviceFacts("H200", n_sm, 64, (9, 0)))


def median_s(call: Callable[[], Any]) -> float:
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))


async def drawn_s(figure: Any, folder: Path) -> float:
    """Until Chromium has drawn the figure."""
    from browser import Browser

    figure.write_html(folder / "plot.html", include_plotlyjs="directory")
    async with Browser() as browser:
        page = await browser.page(1366, 900)
        await page.goto((folder / "plot.html").as_uri())
        await page.wait_for("document.querySelector('.js-plotly-plot')?._fullData?.length")
        return float(np.median([await page.evaluate(DRAW) for _ in range(ROUNDS)])) / 1e3


def main() -> None:
    from browser import find_chromium

    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    o = parser.parse_args()
    t = waves(o.blocks)
    figure = t.plot()  # plotly is imported
    results = {"built": median_s(t.plot)}
    if find_chromium() is not None:
        with tempfile.TemporaryDirectory() as folder:
            results["drawn"] = asyncio.run(drawn_s(figure, Path(folder)))
    explored = t.explore()
    length = int(t.blocks["end_ns"].max() - t.blocks["start_ns"].min())
    zooms = iter(np.linspace(0.1, 0.5, ROUNDS) * length)
    results["zoomed"] = median_s(lambda: explored.update_xaxes(range=[0, next(zooms)]))
    show(f"all views of {o.blocks:,} blocks", ["", "s"], results.items())
    figures = {f"plot.{name}": f"{s:.2f}" for name, s in results.items()}
    print(save("plot_speed", {"blocks": o.blocks, **results}, folder=o.out, figures=figures))


if __name__ == "__main__":
    main()
