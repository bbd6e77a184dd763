"""The parameter account as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from ldlm.account import Line


def account_table(lines: Iterable[Line]) -> Table:
    """Component, calculation, parameters and the published value beside it."""
    table = Table(
        title="Parameters",
        caption=(
            "published: seeds of the paper's page; the split between the four parts is a\n"
            "reconstruction that meets both published totals"
        ),
    )
    table.add_column("component")
    table.add_column("calculation", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("published", justify="right", no_wrap=True)
    for line in lines:
        published = "" if line.published is None else f"{line.published:,}"
        if line.published is not None:
            same = line.published == line.parameters
            published = f"[green]{published} =[/]" if same else f"[yellow]{published} ≠[/]"
        table.add_row(line.component, line.calculation, f"{line.parameters:,}", published)
    return table
