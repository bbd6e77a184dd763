"""How tables look. Every text stands in them as it is: nothing in it is taken for markup."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

BAD, GOOD, WARNING = "red", "green", "yellow"
Cell = str | Text


def table(title: str, columns: Sequence[str], caption: Cell = "", *, dense: bool = False) -> Table:
    """An empty table.

    Args:
        title: above it.
        columns: their names; one that begins with ">" holds numbers: on the right, never cut.
        caption: below it.
        dense: for many columns.
    """
    made = Table(
        title=Text(title, "table.title"),
        caption=Text.assemble(caption, style="table.caption") if caption else None,
        box=box.SIMPLE_HEAD if dense else box.HEAVY_HEAD,
        padding=(0, 0, 0, 1) if dense else (0, 1),
    )
    for name in columns:
        numeric = name.startswith(">")
        made.add_column(
            Text(name.removeprefix(">")),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    return made


def add_row(made: Table, *cells: Cell) -> None:
    """Add a row; a cell is a text as it is, or one with a style."""
    made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def marked(text: str, *, good: bool, otherwise: str = BAD) -> Text:
    """A text that stands out where something is not good."""
    return Text(text, "" if good else otherwise)


def verdict(passed: bool | None) -> Text:
    """pass or FAIL."""
    return Text("pass", GOOD) if passed else Text("FAIL", BAD)
