"""The parameter account as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from engines.show.table import GOOD, WARNING, Cell, marked, table
from ldlm.account import Line


def account_table(lines: Iterable[Line]) -> Table:
    """Component, calculation, parameters and the published value beside it."""

    def published(line: Line) -> Cell:
        if line.published is None:
            return ""
        sign, style = ("=", GOOD) if line.published == line.parameters else ("≠", WARNING)
        return marked(f"{line.published:,} {sign}", good=False, otherwise=style)

    return table(
        "Parameters",
        ("component", "calculation", ">parameters", ">published"),
        [(ln.component, ln.calculation, f"{ln.parameters:,}", published(ln)) for ln in lines],
        "published: seeds of the paper's page; the split between the four parts is a\n"
        "reconstruction that meets both published totals",
    )
