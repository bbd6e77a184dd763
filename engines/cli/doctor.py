"""ldlm doctor: what works on this machine."""

from pathlib import Path

from engines.cli import options as opt
from engines.cli._shared import say, show


def command(folder: opt.AnyFolder = Path(), as_json: opt.Json = False) -> None:
    """Say what works here, what would need something more, and what to install."""
    from engines.doctor import GOOD, examine
    from engines.show.findings import findings_table

    findings = examine(folder)
    show(findings, findings_table(findings), as_json=as_json)
    if not as_json:
        say(f"{sum(found.level == GOOD for found in findings)} of {len(findings)} green")
