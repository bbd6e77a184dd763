"""ldlm engines: from a checkpoint to verified engines."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.cli import build, export, verify
from engines.cli._shared import (
    EXPLAIN,
    CheckpointFolder,
    OutFolder,
    default_artifacts,
    precisions,
)
from engines.compile.target import chosen_target
from engines.tensorrt.targets import RTX
from export.precision import Precision


def command(
    checkpoint: CheckpointFolder,
    folder: OutFolder = None,
    precision: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "fp32,fp16",
    target: Annotated[str, typer.Option(help="rtx or trt; see ldlm build.")] = RTX,
    sm: Annotated[str, typer.Option(help="Compute capabilities; see ldlm build.")] = "all",
    profile: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    batch: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    length: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN)] = False,
) -> None:
    """Export, verify and build what has changed; stops at the first gate that fails."""
    chosen_target(target, sm)  # wrong options are refused before the long work
    for name in precisions(precision):
        Precision.of(name).require(target)
    folder = folder or default_artifacts(checkpoint)
    export.command(checkpoint, folder, precision, explain=explain)
    found = verify.prove(folder, checkpoint, precisions(precision))
    if found.new.scopes:
        verify.show(found)
        found.save()
        found.new.require_passed()
    build.command(folder, precision, target, sm, profile, batch, length, explain=explain)
