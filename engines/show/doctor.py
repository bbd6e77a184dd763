"""What works on this machine, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from engines.doctor import Finding
from engines.show.table import table


def findings_table(findings: Iterable[Finding]) -> Table:
    """What was looked at, what was found, what it means, and what to do about it."""
    rows = [
        (Text(f"{each.level:<7}{each.what}", each.level), each.found, each.means, each.remedy)
        for each in findings
    ]
    made = table("This machine", ("", "found", "means", "to change that"), rows)
    made.show_lines = True
    return made
