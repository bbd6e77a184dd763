"""ldlm build: ONNX graphs to TensorRT engines."""

from __future__ import annotations

from engines.cli import options as opt
from engines.cli._shared import measured, names, numbers, out, precisions, progress, record, say
from engines.show.decisions import decisions_table
from engines.show.summary import summary_table
from engines.tensorrt.targets import RTX


def command(
    folder: opt.ArtifactsFolder,
    precision: opt.Compiled = None,
    target: opt.Target = RTX,
    sm: opt.Sm = "all",
    profile: opt.Profile = None,
    batch: opt.BatchRange = None,
    length: opt.LengthRange = None,
    unfused: opt.Unfused = False,
    explain: opt.Explain = False,
) -> None:
    """Compile the engines that have changed, and show what the folder holds."""
    from engines.api import Artifacts

    artifacts = Artifacts(folder)
    with measured("build") as run, progress() as told:
        decisions = artifacts.build(
            precisions(precision),
            target=target,
            sms=sm,
            names=names(profile),
            batch=numbers(batch, "--batch", 3),
            length=numbers(length, "--length", 3),
            unfused=unfused,
            progress=told,
        )
    done = record(folder, "build", decisions, run)
    if explain:
        out.print(decisions_table("build", decisions))
    out.print(summary_table(folder, artifacts.manifest))
    say(f"{folder}: {done}")
