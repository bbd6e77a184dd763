"""ldlm init: a checkpoint with seeded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engines.cli._shared import measured, say, spinner
from ldlm.config import preset


def command(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder to write.")],
    preset_name: Annotated[str, typer.Option("--preset", help="base or small.")] = "base",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an older checkpoint.")] = False,
) -> None:
    """Write a checkpoint whose every tensor is drawn from a seed.

    No trained weights of the published model are public. These are for building, measuring and
    testing.
    """
    config = preset(preset_name)
    from ldlm import checkpoint, tokenizer
    from ldlm.initialise import initialise
    from ldlm.model import LDLM

    checkpoint.require_new(folder, force=force)
    with measured("init"), spinner() as progress:
        progress("drawing weights")
        model = initialise(LDLM(config), seed)
        model.tokenizer_json = tokenizer.create(config).to_str()
        progress("writing")
        model.save_checkpoint(folder)
    say(f"{folder}: preset {preset_name}, seed {seed}")
