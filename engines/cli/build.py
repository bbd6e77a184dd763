"""ldlm build: ONNX graphs to TensorRT-RTX engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engines import manifest as manifests
from engines.cli._shared import measured, numbers, out, precisions, steps
from engines.compile.targets import RTX, parse_sms, profile
from ldlm.errors import ConfigError


def command(
    folder: Annotated[Path, typer.Argument(help="Artifacts folder.")],
    precision: Annotated[
        str | None, typer.Option(help="Precisions, comma-separated; default: every exported one.")
    ] = None,
    target: Annotated[str, typer.Option(help="rtx.")] = RTX,
    sm: Annotated[
        str,
        typer.Option(
            help="Compute capabilities, such as 80,8.9,sm120. 'all' builds every one that a "
            "stage can have and says why it cannot have another; a list must be met in full."
        ),
    ] = "all",
    batch: Annotated[str | None, typer.Option(help="Profile MIN,OPT,MAX; default 1,1,8.")] = None,
    length: Annotated[
        str | None, typer.Option(help="Profile MIN,OPT,MAX; default every length.")
    ] = None,
) -> None:
    """Compile the engines, on any machine, and show what the folder holds."""
    from engines.artifacts import build_artifacts
    from engines.report import summary_table

    if target != RTX:
        raise ConfigError("no such build target", expected=RTX, got=target)
    sms = parse_sms(sm)
    config = manifests.load(folder).config
    ranges = profile(config, numbers(batch, "--batch"), numbers(length, "--length"))
    with measured("build") as run, steps() as progress:
        build_artifacts(
            folder,
            precisions(precision) if precision is not None else None,
            sms,
            ranges,
            skip_unsupported=sm.strip().lower() == "all",
            progress=progress,
        )
    with manifests.updated(folder) as manifest:
        manifest.runs["build"] = run
    out.print(summary_table(folder, manifest))
