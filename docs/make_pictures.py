"""Makes the pictures of README.md and docs/pictures.md from the recorded examples: PNG, and SVG of README's.

    python docs/make_pictures.py

A picture shows the recording of the real H200 where it is shipped, else the virtual one's. The captions between the
markers in both pages are written anew, from what the traces say of themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import paellapy as pp
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz import save_comparison, save_figure

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
README = ("streams-paella",)
PAGES = (DOCS.parent / "README.md", DOCS / "pictures.md")


def tail_effect(path: Path) -> str:
    t = pp.recordings.load("tail-effect")
    save_figure(t, path, ["heatmap", "residency"], size_inches=(8, 4.6))
    (kernel,) = t.summary().kernels
    return (
        f"{kernel.blocks:,} blocks in {kernel.waves:.1f} waves, some longer than others: {kernel.tail_share:.0%} of "
        f"the kernel's time passes after the first SM has run dry. {pp.recordings.origin(t)}"
    )


def streams_against_paella(path: Path) -> str:
    streams, paella = pp.recordings.load("mix-streams"), pp.recordings.load("mix-paella")
    assert isinstance(streams, EngineTrace)
    assert isinstance(paella, EngineTrace)
    both = streams, paella
    rush_ms = [float(done_ms(t, "long").max()) for t in both]
    ms = math.ceil(max(rush_ms))  # afterwards there is nothing to schedule
    shown = [t.select(end_ns=after_ms(t, ms)) for t in both]
    labels = "CUDA streams: the hardware decides", "paella: software decides, two jobs at a time"
    save_comparison(*shown, path, ["requests", "residency"], labels=labels, size_inches=(11, 5.2))
    late = [int((t.lateness_ns() > 0).sum()) for t in both]
    short = [latencies_ms(t, "short") for t in both]
    mean, worst = ([f"{f(each):.2g}" for each in short] for f in (np.mean, np.max))
    return (
        f"The same {len(streams.jobs)} requests for two models; here, the first {ms} ms. Left, {late[0]} of them miss "
        f"their deadline, right, {late[1]}; a `short` takes {mean[0]} and {mean[1]} ms on average, {worst[0]} and "
        f"{worst[1]} at worst. The last `long` is done after {rush_ms[0]:.1f} and {rush_ms[1]:.1f} ms. "
        f"{pp.recordings.origin(paella)}"
    )


def after_ms(trace: EngineTrace, ms: float) -> int:
    """On the trace's clock: so long after the first arrival."""
    return int(trace.jobs["arrival_ns"].min()) + int(ms * 1e6)


def done_ms(trace: EngineTrace, model: str) -> NDArray[np.float64]:
    jobs = trace.jobs[trace.jobs["model"] == trace.models.index(model)]
    since: NDArray[np.float64] = (jobs["end_ns"] - after_ms(trace, 0)) / 1e6
    return since


def latencies_ms(trace: EngineTrace, model: str) -> NDArray[np.float64]:
    jobs = trace.jobs[trace.jobs["model"] == trace.models.index(model)]
    found: NDArray[np.float64] = (jobs["end_ns"] - jobs["arrival_ns"]) / 1e6
    return found


def gantt(path: Path) -> str:
    t, last_sm = pp.recordings.load("two-streams"), 11
    save_figure(t, path, "gantt", sms=(0, last_sm), size_inches=(8, 4))
    gemm, softmax = (t.select(kernel=kernel).blocks for kernel in ("gemm", "softmax"))
    beside = (gemm["start_ns"][:, None] < softmax["end_ns"]) & (softmax["start_ns"] < gemm["end_ns"][:, None])
    return (
        f"Blocks of two kernels on two streams, each in a lane of its SM; here, SMs 0 to {last_sm}. "
        f"{int(beside.any(axis=0).sum()):,} of the {len(softmax):,} blocks of `softmax` run beside a `gemm`. "
        f"{pp.recordings.origin(t)}"
    )


def waves(path: Path) -> str:
    t = pp.recordings.load("add-two-waves")
    save_figure(t, path, "residency", size_inches=(8, 2.4))
    (kernel,) = t.summary().kernels
    return (
        f"`{kernel.kernel}` in {kernel.waves:.0f} waves, against its theoretical occupancy (dashed). "
        f"{pp.recordings.origin(t)}"
    )


def requests(path: Path) -> str:
    t = pp.recordings.load("mix-streams")
    assert isinstance(t, EngineTrace)
    save_figure(t, path, "requests", size_inches=(8, 3.6))
    late = int((t.lateness_ns() > 0).sum())
    return f"{len(t.jobs)} requests under `{t.policy}`, {late} late. {pp.recordings.origin(t)}"


def linked(path: Path) -> str:
    t, ms = pp.recordings.load("mix-paella"), 3
    assert isinstance(t, EngineTrace)
    save_figure(t, path, "all", size_inches=(8, 10), dpi=110, end_ns=after_ms(t, ms))
    return f"All views on one time axis, the first {ms} ms; colours stand for models. {pp.recordings.origin(t)}"


MAKERS: dict[str, Callable[[Path], str]] = {
    "tail-effect": tail_effect,
    "streams-paella": streams_against_paella,
    "gantt": gantt,
    "waves": waves,
    "requests": requests,
    "linked": linked,
}


def captioned(page: str, captions: dict[str, str]) -> str:
    """The page with each `<!-- caption: name -->` … `<!-- end -->` filled anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- caption: {found[1]} -->\n{captions[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- caption: ([\w-]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def make(folder: Path) -> dict[str, str]:
    """Draws every picture; their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, draw in MAKERS.items():
        captions[name] = draw(folder / f"{name}.png")
        if name in README:
            draw(folder / f"{name}.svg")
    return captions


def main() -> None:
    captions = make(PICTURES)
    for page in PAGES:
        page.write_text(captioned(page.read_text(), captions))
    for name, caption in captions.items():
        print(f"{name}: {caption}")


if __name__ == "__main__":
    main()
