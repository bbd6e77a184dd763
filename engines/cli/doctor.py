"""ldlm doctor: what works on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from engines.cli._shared import out, say


def command(
    folder: Annotated[Path, typer.Argument(help="Where artifacts would be written.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works here, what would need something more, and what to install."""
    from engines.doctor import GOOD, examine

    findings = examine(folder)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        return
    table = Table(title="This machine", show_lines=True)
    for column in ("", "found", "means", "to change that"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        what = Text(f"{finding.level:<7}{finding.what}", style=finding.level)
        table.add_row(what, Text(finding.found), Text(finding.means), Text(finding.remedy))
    out.print(table)
    good = sum(finding.level == GOOD for finding in findings)
    say(f"{good} of {len(findings)} green")
