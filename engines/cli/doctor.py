"""ldlm doctor: what works on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from engines.cli._shared import out, say


def command(
    folder: Annotated[Path, typer.Argument(help="Where artifacts would be written.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works here, what would need something more, and what to install."""
    from engines.doctor import GOOD, examine
    from engines.show.findings import findings_table

    findings = examine(folder)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(finding) for finding in findings]))
        return
    out.print(findings_table(findings))
    good = sum(finding.level == GOOD for finding in findings)
    say(f"{good} of {len(findings)} green")
