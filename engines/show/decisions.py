"""What was made, what was kept, and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from engines.artifacts.ingredients import Decision
from engines.show.table import add_row, table


def decisions_table(command: str, decisions: Sequence[Decision]) -> Table:
    """What was made, what was kept, and why."""
    made = table(f"{command}: what was done, and why", ("file", "done", "because"))
    for decision in decisions:
        because = "; ".join(decision.reasons) or "nothing that it depends on has changed"
        add_row(made, decision.what, "made" if decision.reasons else "kept", because)
    return made
