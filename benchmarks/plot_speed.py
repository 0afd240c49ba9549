"""Time to build the pictures of 100,000 blocks on 132 SMs, their size, and the time a browser takes to draw them.

python benchmarks/plot_speed.py [--blocks 100000] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from browser import Browser, find_chromium
from common import save

import paellapy as pp
from paellapy.instrument.records import BLOCK, LAUNCH
from paellapy.instrument.traces.trace import DeviceFacts
from paellapy.viz import data

ROUNDS = 5
FILES = {"to_html": "html", "save_figure": "png", "to_perfetto": "json"}


def waves(blocks: int, n_sm: int = 132, per_sm: int = 8, kernels: int = 3) -> pp.Trace:
    """Kernels one after the other, `per_sm` blocks of 1 to 3 µs at a time on each SM, none of them idle."""
    slots = n_sm * per_sm
    rounds = -(-blocks // slots)
    kernel = np.arange(blocks) * kernels // blocks
    duration = np.zeros(rounds * slots, np.int64)
    duration[:blocks] = np.random.default_rng(0).integers(32, 96, blocks) * 32
    end = np.cumsum(duration.reshape(rounds, slots), axis=0).ravel()
    rows = np.zeros(blocks, BLOCK)
    rows["launch"], rows["kernel"], rows["block"] = kernel + 1, kernel, np.arange(blocks)
    rows["sm"] = np.arange(blocks) % slots % n_sm
    rows["start_ns"], rows["end_ns"] = (end - duration)[:blocks], end[:blocks]
    launches = np.zeros(kernels, LAUNCH)
    launches["launch"], launches["kernel"] = np.arange(kernels) + 1, np.arange(kernels)
    launches["warps"], launches["registers"] = 8, 32
    launches["blocks"] = np.bincount(kernel)
    return pp.Trace(rows, launches, [f"kernel_{k}" for k in range(kernels)], DeviceFacts("H200", n_sm, 64, (9, 0)))


def median_s(call: Callable[[], Any]) -> float:
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))


# Plotly itself is there before, as in a notebook.
DRAW = """(async () => {
  const shown = document.querySelector('.js-plotly-plot'), place = document.createElement('div');
  document.body.append(place);
  const began = performance.now();
  await Plotly.newPlot(place, shown.data, shown.layout);
  const drawn = performance.now();
  const [first, last] = place.layout.xaxis.range;
  await Plotly.relayout(place, {'xaxis.range': [first + (last - first) / 3, first + (last - first) / 2]});
  return [drawn - began, performance.now() - drawn];
})()"""


async def drawn_s(figure: Any, folder: Path) -> tuple[float, float]:
    """Until Chromium has drawn the figure, and until it has drawn a part of it anew."""
    figure.write_html(folder / "plot.html", include_plotlyjs="directory")
    async with Browser() as browser:
        page = await browser.page(1366, 900)
        await page.goto((folder / "plot.html").as_uri())
        await page.wait_for("document.querySelector('.js-plotly-plot')?._fullData?.length")
        found = [await page.evaluate(DRAW) for _ in range(ROUNDS)]
    draw_ms, zoom_ms = np.median(found, axis=0)
    return float(draw_ms) / 1e3, float(zoom_ms) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    t = waves(given.blocks)
    start = time.perf_counter()
    t.plot()
    results: dict[str, Any] = {"blocks": given.blocks, "SMs": t.device.n_sm}
    results["first plot"] = {"s": time.perf_counter() - start}  # plotly's import included
    for name in ("plot_heatmap", "plot_gantt", "plot_residency", "plot"):
        draw = getattr(t, name)
        results[name] = {"s": median_s(draw), "json_bytes": len(draw().to_json())}
    with tempfile.TemporaryDirectory() as folder:
        for name, ending in FILES.items():
            write, path = getattr(t, name), Path(folder) / f"trace.{ending}"
            results[name] = {"s": median_s(lambda write=write, path=path: write(path)), "bytes": path.stat().st_size}
        if find_chromium() is not None:
            draw_s, zoom_s = asyncio.run(drawn_s(t.plot(), Path(folder)))
            results |= {"plot, drawn by Chromium": {"s": draw_s}, "plot, zoomed in Chromium": {"s": zoom_s}}
    explored = t.explore()
    zooms = iter(np.linspace(0.1, 0.5, ROUNDS) * data.prepare(t).axis.length)
    results["explore, zoomed"] = {"s": median_s(lambda: explored.update_xaxes(range=[0, next(zooms)]))}
    for name, numbers in results.items():
        if isinstance(numbers, dict):
            size = numbers.get("json_bytes", numbers.get("bytes", 0)) / 1e6
            print(f"{name:25} {numbers['s']:6.2f} s  {size:6.2f} MB")
    print("written to", save("plot_speed", results, None, given.out))


if __name__ == "__main__":
    main()
