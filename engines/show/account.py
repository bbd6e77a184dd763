"""The parameter account as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from engines.show.table import GOOD, WARNING, add_row, marked, table
from ldlm.account import Line


def account_table(lines: Iterable[Line]) -> Table:
    """Component, calculation, parameters and the published value beside it."""
    made = table(
        "Parameters",
        ("component", "calculation", ">parameters", ">published"),
        "published: seeds of the paper's page; the split between the four parts is a\n"
        "reconstruction that meets both published totals",
    )
    for line in lines:
        same = line.published == line.parameters
        sign, style = ("=", GOOD) if same else ("≠", WARNING)
        shown = "" if line.published is None else f"{line.published:,} {sign}"
        published = marked(shown, good=False, otherwise=style)
        add_row(made, line.component, line.calculation, f"{line.parameters:,}", published)
    return made
