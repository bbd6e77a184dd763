"""ldlm export: a checkpoint to ONNX graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engines import manifest as manifests
from engines.cli._shared import default_artifacts, measured, precisions, say, spinner


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Artifacts folder; default artifacts/<name>.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "fp32,fp16",
    without_island: Annotated[
        list[str] | None,
        typer.Option(help="Experiment: leave this island in half; again for another one."),
    ] = None,
) -> None:
    """Export every stage to ONNX, checked, with a manifest."""
    from engines.artifacts import export_artifacts
    from export.precision import experiment

    folder = folder or default_artifacts(checkpoint)
    with measured("export") as run, spinner() as progress:
        chosen = [experiment(name, without_island or []) for name in precisions(precision)]
        export_artifacts(checkpoint, folder, chosen, progress)
    with manifests.updated(folder) as manifest:
        manifest.runs["export"] = run
    say(f"{folder}: {len(manifest.graphs)} graphs")
