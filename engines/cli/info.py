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
    from engines.show.account import account_table
    from ldlm.account import account
    from ldlm.checkpoint import WEIGHTS, model_shapes, read_config, read_header, require_tensors

    if checkpoint is None:
        config = preset(preset_name)
    else:
        config = read_config(checkpoint)
        require_tensors(
            read_header(checkpoint / WEIGHTS), model_shapes(config), checkpoint / WEIGHTS
        )
    lines = account(config)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(line) for line in lines]))
    else:
        out.print(account_table(lines))
