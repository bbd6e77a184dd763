"""ldlm export: a checkpoint to ONNX graphs."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.cli._shared import (
    EXPLAIN,
    CheckpointFolder,
    OutFolder,
    default_artifacts,
    measured,
    out,
    precisions,
    record,
    say,
    spinner,
)
from engines.show.summary import decisions_table


def command(
    checkpoint: CheckpointFolder,
    folder: OutFolder = None,
    precision: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "fp32,fp16",
    without_island: Annotated[
        list[str] | None,
        typer.Option(help="Experiment: leave this island in half; again for another one."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN)] = False,
) -> None:
    """Export every stage to ONNX, checked, with a manifest; only what has changed."""
    from engines.api import Artifacts
    from export.precision import Precision

    folder = folder or default_artifacts(checkpoint)
    chosen = [Precision.of(name).without(without_island or []) for name in precisions(precision)]
    with measured("export") as run, spinner() as progress:
        decisions = Artifacts(folder).export(checkpoint, chosen, progress)
    done = record(folder, "export", decisions, run)
    if explain:
        out.print(decisions_table("export", decisions))
    say(f"{folder}: {done}")
