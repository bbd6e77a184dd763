"""What was made, what was kept, and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from engines.artifacts.ingredients import Decision


def decisions_table(command: str, decisions: Sequence[Decision]) -> Table:
    """What was made, what was kept, and why."""
    table = Table(title=f"{command}: what was done, and why")
    for column in ("file", "done", "because"):
        table.add_column(column, overflow="fold")
    for decision in decisions:
        because = "; ".join(decision.reasons) or "nothing that it depends on has changed"
        done = "made" if decision.reasons else "kept"
        table.add_row(decision.what, done, Text(because))
    return table
