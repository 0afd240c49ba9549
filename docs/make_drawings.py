"""Makes the drawings of docs/concepts.md and README.md: SVG, on a ground of their own for any theme.

python docs/make_drawings.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "drawings"
INK, SOFT, GROUND = "#22303c", "#5b6b7a", "#ffffff"
BLUE, ORANGE, GREEN, PALE = "#0072B2", "#E69F00", "#009E73", "#eef2f6"


class Drawing:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.parts = (width, height), [f"<title>{escape(title)}</title>"]

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = PALE, ink: str = INK) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{SOFT}" stroke-width="1"/>'
        )
        lines = text.split("\n") if text else []
        for k, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + (k - (len(lines) - 1) / 2) * 17, line, ink, "middle")

    def text(self, x: float, y: float, text: str, ink: str = INK, anchor: str = "start", size: int = 14) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" fill="{ink}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{SOFT}" stroke-width="1.6" marker-end="url(#a)"/>'
        )

    def svg(self) -> str:
        w, h = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
            'font-family="system-ui, sans-serif">'
            f'<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker></defs>'
            f'<rect width="{w}" height="{h}" rx="8" fill="{GROUND}"/>'
        )
        return head + "\n".join(self.parts) + "</svg>\n"


def reports() -> Drawing:
    d = Drawing(720, 336, "How a kernel comes to report")
    for k, text in enumerate(("your kernel\nTriton or CUDA C", "plain PTX", "PTX that\nreports", "machine code")):
        d.box(20 + 187 * k, 20, 122, 56, text)
        if k:
            d.arrow((142 + 187 * (k - 1), 48), (20 + 187 * k, 48))
    for k, text in enumerate(("compile", "pass", "ptxas")):
        d.text(174 + 187 * k, 40, text, SOFT, "middle", 12)
    d.text(20, 118, "on the GPU, while it runs:", SOFT)
    for sm in range(3):
        x = 20 + 180 * sm
        d.box(x, 130, 150, 84, "", "#fff")
        d.text(x + 10, 150, f"SM {sm}" if sm < 2 else "SM 131", SOFT, size=12)
        for slot, fill in enumerate((BLUE, GREEN, BLUE)):
            d.box(x + 8 + 46 * slot, 160, 43, 42, "block", fill, "#fff")
        d.arrow((x + 75, 214), (x + 75, 240))
        d.box(x + 10, 242, 130, 30, "its own ring", "#fdf3dc")
        d.parts.append(f'<path d="M{x + 75},272 V288" stroke="{SOFT}" stroke-width="1.6"/>')
    d.parts.append(f'<path d="M95,288 H640" stroke="{SOFT}" stroke-width="1.6"/>')
    d.arrow((640, 288), (640, 258))
    d.box(565, 200, 145, 56, "Trace:\nblock × SM × time", PALE)
    d.text(20, 320, "A block writes one record of 16 bytes into the ring of its SM: blocks share no counter.", SOFT)
    return d


def segments() -> Drawing:
    d = Drawing(720, 346, "Instances and segments")
    d.text(20, 30, "requests", SOFT)
    for k in range(3):
        d.box(20, 40 + 34 * k, 90, 26, f"request {k + 1}", "#fff")
        d.arrow((110, 53 + 34 * k), (150, 53 + 34 * k))
    d.box(150, 34, 120, 104, "", PALE)
    d.text(210, 28, "instance: buffers of one batch", SOFT, "middle", 12)
    for k in range(3):
        d.box(160, 40 + 34 * k, 100, 26, f"slot {k + 1}", "#fff")
    d.arrow((270, 86), (310, 86))
    d.text(480, 58, "job: the instance, once it is closed; its program in segments", SOFT, "middle", 12)
    for k in range(5):
        d.box(312 + 72 * k, 70, 66, 34, f"seg. {k + 1}", BLUE if k < 2 else "#fff", "#fff" if k < 2 else INK)
    d.text(312, 124, "done or running", BLUE, size=12)
    d.text(456, 124, "waiting: another job may go first", SOFT, size=12)
    d.text(20, 190, "the GPU, over time", SOFT)
    d.arrow((20, 320), (700, 320))
    d.text(640, 340, "time", SOFT, size=12)
    long_, short = [(20, 3), (300, 3)], [(188, 2), (468, 2)]
    for x, n in long_:
        for k in range(n):
            d.box(x + 56 * k, 210, 52, 34, "long", BLUE, "#fff")
    for x, n in short:
        for k in range(n):
            d.box(x + 56 * k, 262, 52, 34, "short", ORANGE, INK)
    d.arrow((180, 312), (188, 298))
    d.text(40, 312, "a short request comes", SOFT, size=12)
    d.text(300, 190, "between two segments the policy chooses again", SOFT, size=12)
    return d


def partitions() -> Drawing:
    d = Drawing(720, 230, "SM partitions and hardware queues")
    d.text(20, 30, "partitions: each is a part of the SMs, and neighbours overlap", SOFT)
    for sm in range(44):
        x = 20 + 15.4 * sm
        d.parts.append(f'<rect x="{x:.1f}" y="42" width="13" height="18" rx="2" fill="{PALE}" stroke="{SOFT}"/>')
    for k, colour in enumerate((BLUE, ORANGE, GREEN)):
        d.parts.append(f'<rect x="{20 + 200 * k}" y="{68 + 9 * k}" width="{277}" height="6" rx="3" fill="{colour}"/>')
    d.text(20, 130, "hardware queues: CUDA deals launches out in turn; a long graph holds up those behind it", SOFT)
    for q in range(4):
        y = 142 + 20 * q
        d.text(20, y + 12, f"queue {q}", SOFT, size=11)
        d.box(80, y, 300 if q == 1 else 90, 15, "", BLUE)
        d.box(390 if q == 1 else 180, y, 40, 15, "", ORANGE)
    d.text(440, 174, "waits for the long graph before it", SOFT, size=12)
    return d


class Theme(NamedTuple):
    ground: str
    ink: str
    soft: str
    rival: str
    ours: str


LIGHT, DARK = Theme("#ffffff", INK, SOFT, "#c3ccd5", BLUE), Theme("#0d1117", "#e6edf3", "#9aa7b4", "#4a5663", "#58a6e0")
RIVALS = {
    "batcher": "dynamic batcher", "streams": "CUDA streams", "queues": "streams, 32 hardware queues",
    "mps": "MPS, 25 % of the SMs each", "ours": "paellapy",
}  # fmt: skip


def load(theme: Theme) -> str:
    """A bar for each system, wide enough for letters that one can read on a phone."""
    figures = tomllib.loads((FOLDER.parent / "figures.toml").read_text())["figures"]
    shown = {name: figures[f"rate.{name}"] for name in RIVALS}
    numbers = {name: float(rate.replace(",", "")) for name, rate in shown.items()}
    widths = {name: 300 * number / max(numbers.values()) for name, number in numbers.items()}
    said = "Requests a second with 99 % in time"
    parts = [f"<title>{said}: {', '.join(f'{RIVALS[name]} {rate}' for name, rate in shown.items())}</title>"]
    parts.append(f'<rect width="400" height="292" rx="8" fill="{theme.ground}"/>')
    parts.append(f'<text x="14" y="30" fill="{theme.ink}" font-size="17" font-weight="600">{said}</text>')
    for k, (name, rate) in enumerate(shown.items()):
        y, ours = 56 + 47 * k, name == "ours"
        ink, weight = (theme.ink, "600") if ours else (theme.soft, "400")
        bar = theme.ours if ours else theme.rival
        parts += [
            f'<text x="14" y="{y}" fill="{ink}" font-size="15" font-weight="{weight}">{RIVALS[name]}</text>',
            f'<rect x="14" y="{y + 7}" width="{widths[name]:.0f}" height="18" rx="3" fill="{bar}"/>',
            f'<text x="{22 + widths[name]:.0f}" y="{y + 22}" fill="{theme.ink}" font-size="15" '
            f'font-weight="{weight}">{rate}</text>',
        ]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 292" width="400" height="292" '
        'font-family="system-ui, sans-serif">'
    )
    return head + "\n".join(parts) + "</svg>\n"


DRAWINGS: dict[str, Callable[[], str]] = {
    "reports": lambda: reports().svg(),
    "segments": lambda: segments().svg(),
    "partitions": lambda: partitions().svg(),
    "load-light": lambda: load(LIGHT),
    "load-dark": lambda: load(DARK),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
