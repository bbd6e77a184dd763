"""ldlm info: the parameter account."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from engines.cli._shared import out
from ldlm.config import preset


def command(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint folder; default: the preset.")
    ] = None,
    preset_name: Annotated[str, typer.Option("--preset", help="base or small.")] = "base",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every component, its calculation, its parameters and the published value."""
    from engines.show.findings import account_table
    from ldlm.account import account
    from ldlm.checkpoint import WEIGHTS, read_config, read_header, require_tensors
    from ldlm.model import skeleton

    if checkpoint is None:
        config = preset(preset_name)
    else:
        config = read_config(checkpoint)
        weights = checkpoint / WEIGHTS
        require_tensors(read_header(weights), skeleton(config).shapes(), weights)
    lines = account(config)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(line) for line in lines]))
    else:
        out.print(account_table(lines))
