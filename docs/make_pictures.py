"""Makes the pictures of README.md and docs/pictures.md from the recorded examples: PNG, and SVG of README's.

    python docs/make_pictures.py

A picture shows the recording of the real H200 where it is shipped, else the virtual one's. The captions between the
markers in both pages are written anew, from what the traces say of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import paellapy as pp
from paellapy.viz import save_comparison, save_figure
from scheduler.engine_trace import EngineTrace

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
README = ("tail-effect", "streams-paella")
PAGES = (DOCS.parent / "README.md", DOCS / "pictures.md")


def tail_effect(path: Path) -> str:
    t = pp.examples.load("tail-effect")
    save_figure(t, path, ["heatmap", "residency"], size_inches=(8, 4.6))
    (kernel,) = t.summary().kernels
    return (
        f"{kernel.blocks:,} blocks in {kernel.waves:.1f} waves, some longer than others: {kernel.tail_share:.0%} of "
        f"the kernel's time passes after the first SM has run dry. {pp.examples.origin(t)}"
    )


def streams_against_paella(path: Path) -> str:
    both = streams, paella = pp.examples.load("mix-streams"), pp.examples.load("mix-paella")
    assert isinstance(streams, EngineTrace)
    assert isinstance(paella, EngineTrace)
    labels = "CUDA streams: the hardware decides", "paella: software decides, two jobs at a time"
    save_comparison(*both, path, ["requests", "residency"], labels=labels, size_inches=(11, 5.2))
    late = [int((t.lateness_ns() > 0).sum()) for t in (streams, paella)]
    ms = [mean_ms(t, "short") for t in (streams, paella)]
    return (
        f"The same {len(streams.jobs)} requests for two models. Left, {late[0]} of them miss their deadline, right, "
        f"{late[1]}; a `short` takes {ms[0]:.2g} and {ms[1]:.2g} ms on average. {pp.examples.origin(paella)}"
    )


def mean_ms(trace: EngineTrace, model: str) -> float:
    jobs = trace.jobs[trace.jobs["model"] == trace.models.index(model)]
    return float((jobs["end_ns"] - jobs["arrival_ns"]).mean()) / 1e6


def gantt(path: Path) -> str:
    t = pp.examples.load("two-streams")
    save_figure(t, path, "gantt", size_inches=(8, 4))
    return f"Blocks of two kernels on two streams, each in a lane of its SM. {pp.examples.origin(t)}"


def waves(path: Path) -> str:
    t = pp.examples.load("add-two-waves")
    save_figure(t, path, "residency", size_inches=(8, 2.4))
    (kernel,) = t.summary().kernels
    return (
        f"`{kernel.kernel}` in {kernel.waves:.0f} waves, against its theoretical occupancy (dashed). "
        f"{pp.examples.origin(t)}"
    )


def requests(path: Path) -> str:
    t = pp.examples.load("mix-streams")
    assert isinstance(t, EngineTrace)
    save_figure(t, path, "requests", size_inches=(8, 3.6))
    late = int((t.lateness_ns() > 0).sum())
    return f"{len(t.jobs)} requests under `{t.policy}`, {late} late. {pp.examples.origin(t)}"


def linked(path: Path) -> str:
    t = pp.examples.load("mix-paella")
    save_figure(t, path, "all", size_inches=(8, 10), dpi=110)
    return f"All views on one time axis; colours stand for models. {pp.examples.origin(t)}"


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
