"""How tables look. Every text stands in them as it is: nothing in it is taken for markup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

BAD, GOOD, WARNING = "red", "green", "yellow"
Cell = str | Text
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
        numeric = name.startswith(">")
        made.add_column(
            Text(name.removeprefix(">")),
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in rows:
        if row == RULE:
            made.add_section()
        else:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def pivot(
    title: str,
    names: Sequence[str],
    found: Mapping[tuple[str, ...], Cell],
    columns: Sequence[str] = (),
    caption: Cell = "",
) -> Table:
    """A table with a row for what stands first in the keys, and columns for their last parts.

    Args:
        title, caption: see `table`.
        names: of the columns for what stands first.
        found: the other cells.
        columns: the last parts, in order; default: in the order in which they come.
    """
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


def marked(text: str, *, good: bool, otherwise: str = BAD) -> Text:
    """A text that stands out where something is not good."""
    return Text(text, "" if good else otherwise)
