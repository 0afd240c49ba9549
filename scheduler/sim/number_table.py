"""Tables of numbers on a terminal: numbers are never cut, and long names are wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def number_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], total: bool = False) -> RichTable:
    """The first column has names, the others numbers. `total`: the last row is set apart."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(columns[0], overflow="fold", min_width=8)
    for k, name in enumerate(columns[1:], 1):
        widest = max(len(text) for text in (*name.split("\n"), *(row[k] for row in rows)))
        table.add_column(name, justify="right", no_wrap=True, min_width=widest)
    for number, row in enumerate(rows, 1):
        # Text, so that "[x]" is not read as markup
        table.add_row(*map(Text, row), end_section=total and number == len(rows) - 1)
    return table
