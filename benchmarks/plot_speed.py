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

ROUNDS = 5
# Plotly itself is there before, as in a notebook.
DRAW = """(async () => {
  const shown = document.querySelector('.js-plotly-plot'), place = document.createElement('div');
  document.body.append(place);
  const began = performance.now();
  await Plotly.newPlot(place, shown.data, shown.layout);
  return performance.now() - began;
})()"""


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
    from viz_traces import many

    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    o = parser.parse_args()
    t = many(o.blocks)
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
