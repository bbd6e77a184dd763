"""What works on this machine, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from engines.doctor import Finding
from engines.show.table import add_row, table


def findings_table(findings: Iterable[Finding]) -> Table:
    """What was looked at, what was found, what it means, and what to do about it."""
    made = table("This machine", ("", "found", "means", "to change that"))
    made.show_lines = True
    for finding in findings:
        what = Text(f"{finding.level:<7}{finding.what}", finding.level)
        add_row(made, what, finding.found, finding.means, finding.remedy)
    return made
