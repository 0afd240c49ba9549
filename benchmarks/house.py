"""Counts modules, lines, files and words of this checkout, and of another; stores them where `--out` says.

python benchmarks/house.py [--against CHECKOUT] [--out FOLDER]
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness import PRODUCT, RESULTS, arguments, commits, save, show, trees

LIMITS = {
    "product modules": 230, "product lines": 63_000, "benchmarks, scripts": 35, "benchmarks, lines of Python": 6_500,
    "results, lines": 20_000, "docs, lines of Python": 1_000, "tests, lines of Python": 43_000, "tracked files": 700,
    "hand-written docs, words": 30_000,
}  # fmt: skip


def tracked(checkout: Path) -> list[Path]:
    """Files that git tracks, without links."""
    listed = subprocess.run(["git", "-C", str(checkout), "ls-files", "-z"], capture_output=True, text=True, check=True)
    paths = [checkout / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def counted(checkout: Path) -> dict[str, int]:
    files = tracked(checkout)

    def within(folder: str, ending: str) -> list[Path]:
        return [p for p in files if p.relative_to(checkout).parts[0] == folder and p.suffix == ending]

    product = [path for folder in PRODUCT for path in within(folder, ".py")]
    words = [*within("docs", ".md"), checkout / "README.md"]
    return {
        "product modules": len(product), "product lines": lines(product),
        "benchmarks, scripts": len(within("benchmarks", ".py")),
        "benchmarks, lines of Python": lines(within("benchmarks", ".py")),
        "results, lines": lines(within("benchmarks", ".json")), "docs, lines of Python": lines(within("docs", ".py")),
        "tests, lines of Python": lines(within("tests", ".py")), "tracked files": len(files),
        "hand-written docs, words": sum(len(path.read_text().split()) for path in words),
    }  # fmt: skip


def main() -> None:
    given = arguments(__doc__, against=True).parse_args()
    found = {name: counted(tree) for name, tree in trees(given).items()}
    rows = [[what, *(f"{each[what]:,}" for each in found.values()), f"≤ {limit:,}"] for what, limit in LIMITS.items()]
    head = ["", *found, "limit"]
    show("the house", head, rows)
    if given.out != RESULTS:  # no page quotes it
        print(save("house", {"commits": commits(given), **found}, folder=given.out))


if __name__ == "__main__":
    main()
