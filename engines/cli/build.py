"""ldlm build: ONNX graphs to TensorRT engines."""

from __future__ import annotations

from typing import Annotated

import typer

from engines.artifacts import folder as folders
from engines.cli._shared import (
    EXPLAIN,
    ArtifactsFolder,
    measured,
    names,
    numbers,
    out,
    precisions,
    record,
    say,
    steps,
)
from engines.show.summary import decisions_table, summary_table
from engines.tensorrt.profiles import PROFILES
from engines.tensorrt.targets import RTX


def command(
    folder: ArtifactsFolder,
    precision: Annotated[
        str | None,
        typer.Option(help="Precisions, comma-separated; default: every exported one but int8."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="rtx: TensorRT-RTX, on any machine; trt: TensorRT, for the GPU at hand."),
    ] = RTX,
    sm: Annotated[
        str,
        typer.Option(
            help="Compute capabilities, such as 80,8.9,sm120. 'all' builds every one that a "
            "stage can have and says why it cannot have another; a list must be met in full."
        ),
    ] = "all",
    profile: Annotated[
        str | None,
        typer.Option(help=f"Batch profiles, of {' and '.join(PROFILES)}; default all of them."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="One batch range MIN,OPT,MAX in place of the profiles.")
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Length range MIN,OPT,MAX; default every length.")
    ] = None,
    unfused: Annotated[
        bool,
        typer.Option(
            "--unfused-attention",
            help="Attention from single float32 operators, where a fused kernel is wrong.",
        ),
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help=EXPLAIN)] = False,
) -> None:
    """Compile the engines that have changed, and show what the folder holds."""
    from engines.api import Artifacts

    artifacts = Artifacts(folder)
    with measured("build") as run, steps() as progress:
        decisions = artifacts.build(
            None if precision is None else precisions(precision),
            target=target,
            sms=sm,
            names=None if profile is None else names(profile),
            batch=numbers(batch, "--batch"),
            length=numbers(length, "--length"),
            unfused=unfused,
            progress=progress,
        )
    done = record(folder, "build", decisions, run)
    if explain:
        out.print(decisions_table("build", decisions))
    out.print(summary_table(folder, folders.load(folder)))
    say(f"{folder}: {done}")
