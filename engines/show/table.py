"""How tables look. Every text stands in them as it is: nothing in it is taken for markup."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

BAD, GOOD, WARNING = "red", "green", "yellow"
Cell = str | Text
# Cells of a pivot, by what stands before them in the row and, last, the name of their column.
Cells = dict[tuple[str, ...], Cell]
# Between two rows of a table: a rule.
RULE: tuple[Cell, ...] = ()

K = TypeVar("K")
T = TypeVar("T")


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    caption: Cell = "",
    *,
    dense: bool = False,
) -> Table:
    """A table.

    Args:
        title: above it.
        columns: their names; one that begins with ">" holds numbers: on the right, never cut.
        rows: their cells, each a text as it is, or one with a style; or `RULE`.
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
        header = Text(name.removeprefix(">"))
        if name.startswith(">"):
            made.add_column(header, justify="right", no_wrap=True, overflow="fold")
        else:
            made.add_column(header, overflow="fold")
    for row in rows:
        if row == RULE:
            made.add_section()
        else:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def pivot(
    title: str, names: Sequence[str], found: Cells, columns: Sequence[str] = (), caption: Cell = ""
) -> Table:
    """A table of cells; columns that are not given are those of the cells, as they come."""
    others = columns or list(dict.fromkeys(key[-1] for key in found))
    starts = dict.fromkeys(key[:-1] for key in found)
    rows = [(*start, *(found.get((*start, other), "-") for other in others)) for start in starts]
    return table(title, (*names, *others), rows, caption)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key of theirs, in the order in which they come."""
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def marked(text: str, *, good: bool) -> Text:
    """A text that stands out where something is not good."""
    return Text(text, "" if good else BAD)
