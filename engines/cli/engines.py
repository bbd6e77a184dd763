"""ldlm engines: from a checkpoint to verified engines."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.cli._shared import (
    EXPLAIN,
    CheckpointFolder,
    OutFolder,
    default_artifacts,
    measured,
    names,
    numbers,
    out,
    precisions,
    record,
    say,
    spinner,
)
from engines.show.summary import decisions_table, summary_table
from engines.tensorrt.targets import RTX


def command(
    checkpoint: CheckpointFolder,
    folder: OutFolder = None,
    precision: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "fp32,fp16",
    target: Annotated[str, typer.Option(help="rtx or trt; see ldlm build.")] = RTX,
    sm: Annotated[str, typer.Option(help="Compute capabilities; see ldlm build.")] = "all",
    profile: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    batch: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    length: Annotated[str | None, typer.Option(help="See ldlm build.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: as cores and memory allow.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN)] = False,
) -> None:
    """Export, verify and build what has changed; stops at the first gate that fails."""
    from engines.api import Artifacts
    from engines.pipeline import Asked, make_engines
    from engines.proof.saved import read
    from engines.show.proof import tables

    folder = folder or default_artifacts(checkpoint)
    asked = Asked(
        checkpoint, folder, tuple(precisions(precision)), target, sm,
        None if profile is None else names(profile),
        numbers(batch, "--batch"), numbers(length, "--length"),
    )  # fmt: skip # the items of a row belong together
    with measured("engines") as run, spinner() as progress:
        made = make_engines(asked, progress, workers=workers)
    done = record(folder, "engines", [*made.exported, *made.built], run)
    proof = read(folder).content
    if made.verified and proof is not None:
        for table in tables(proof):
            out.print(table)
    if explain:
        out.print(decisions_table("export", made.exported))
        out.print(decisions_table("build", made.built))
    out.print(summary_table(folder, Artifacts(folder).manifest))
    say(f"{folder}: {done}; {len(made.verified)} verified")
