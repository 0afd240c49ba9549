"""Opens pages of the built site in Chromium, light and dark, on three screens, and says what cannot be read.

    make docs && python docs/look_at_pages.py [--pictures FOLDER] [PAGE …]

Reported: text outside the page, wide blocks that do not scroll, on a desk also tables that do, figures broken into
lines, text with too little contrast, messages of the console.
Without names, the ten pages below are opened. Exit code 1 if anything was found. `--pictures` keeps a picture of each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE / "_build" / "html"
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import Browser, Page, find_chromium  # noqa: E402

PAGES = (
    "index", "start", "concepts", "scheduling", "serving", "policies", "results", "pictures", "reference/api/Engine",
    "reference/http",
)  # fmt: skip
SIZES = {"desk": (1366, 900), "tablet": (768, 1024), "phone": (390, 844)}
# WCAG's least contrast for text of normal size. Code has many colours, and comments are meant to be quiet: 3 is enough.
TEXT_CONTRAST, CODE_CONTRAST = 4.5, 3.0
FAULTS = r"""
((textLeast, codeLeast, mayScroll) => {
  const found = new Set(), root = document.documentElement, width = root.clientWidth;
  if (root.scrollWidth > width + 1) found.add(`the page is ${root.scrollWidth} px wide`);
  const parse = (colour) => (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = (v) => (v <= 10 ? v / 3295 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const above = function* (e) { for (; e; e = e.parentElement) yield e; };
  const ground = (e) => {
    for (const up of above(e)) {
      const colour = parse(getComputedStyle(up).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const scrolls = (e) => [...above(e)].some((up) => /auto|scroll/.test(getComputedStyle(up).overflowX));
  const walker = document.createTreeWalker(document.querySelector("article") || document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.textContent.trim().slice(0, 60), e = node.parentElement;
    if (!text || !e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (e.closest("script, style, svg, .headerlink, .copybtn")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const outside = (box) => box.width >= 1 && (box.left < -1 || box.right > width + 1);
    if ([...range.getClientRects()].some(outside) && !scrolls(e)) found.add(`outside the page: ${text}`);
    const [a, b] = [parse(getComputedStyle(e).color), ground(e)].map(light);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const least = e.closest("pre, code") ? codeLeast : textLeast;
    if (contrast < least) found.add(`contrast ${contrast.toFixed(1)}: ${text}`);
  }
  for (const table of document.querySelectorAll("article table"))
    if (!mayScroll && table.scrollWidth > table.clientWidth + 1)
      found.add(`a table hides ${table.scrollWidth - table.clientWidth} px: ${table.textContent.trim().slice(0, 60)}`);
  for (const cell of document.querySelectorAll("article td")) {
    // a figure, perhaps with a unit, a range or an error
    if (!/^[<>≤≥]?\s?[\d.,]+( ?(to|±|–) ?[\d.,]+)?( [^\s\d]{1,4})?$/.test(cell.textContent.trim())) continue;
    const range = document.createRange();
    range.selectNodeContents(cell);
    if (range.getBoundingClientRect().height > 1.8 * parseFloat(getComputedStyle(cell).lineHeight))
      found.add(`broken: ${cell.textContent.trim()}`);
  }
  for (const image of document.querySelectorAll("article img"))
    if (!image.complete || image.naturalWidth === 0) found.add(`no picture: ${image.src}`);
  return [...found];
})
"""


async def faults(page: Page, name: str, may_scroll: bool) -> list[str]:
    page.errors.clear()
    await page.goto((SITE / f"{name}.html").as_uri())
    return [*await page.evaluate(f"{FAULTS}({TEXT_CONTRAST}, {CODE_CONTRAST}, {int(may_scroll)})"), *page.errors]


async def look(names: tuple[str, ...], pictures: Path | None) -> list[str]:
    """A line for every fault."""
    found = []
    async with Browser() as browser:
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                page = await browser.page(width, height, dark=theme == "dark")
                for name in names:
                    found += [f"{name}, {size}, {theme}: {each}" for each in await faults(page, name, size != "desk")]
                    if pictures:
                        await page.screenshot(pictures / f"{name.replace('/', '-')}-{size}-{theme}.png")
                await page.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="as in start or reference/http; all: every page")
    parser.add_argument("--pictures", type=Path, help="folder for PNG pictures")
    given = parser.parse_args()
    if find_chromium() is None:
        print("no chromium: apt-get install chromium", file=sys.stderr)
        return 1
    if not (SITE / "index.html").exists():
        print("the site is not built: make docs", file=sys.stderr)
        return 1
    names = tuple(given.pages) or PAGES
    if names == ("all",):
        paths = (path.relative_to(SITE).with_suffix("").as_posix() for path in SITE.rglob("*.html"))
        names = tuple(sorted(name for name in paths if not name.startswith(("_", "genindex", "search", "py-modindex"))))
    found = asyncio.run(look(names, given.pictures))
    print(*found, f"{len(names)} pages in {len(SIZES) * 2} ways: {len(found)} faults", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
