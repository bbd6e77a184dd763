"""ldlm engines: from a checkpoint to verified engines."""

from __future__ import annotations

from engines.cli import options as opt
from engines.cli._shared import (
    default_artifacts,
    measured,
    names,
    numbers,
    out,
    precisions,
    progress,
    record,
    say,
)
from engines.show.decisions import decisions_table
from engines.tensorrt.targets import RTX


def command(
    checkpoint: opt.CheckpointFolder,
    folder: opt.Out = None,
    precision: opt.Made = "fp32,fp16",
    target: opt.Target = RTX,
    sm: opt.Sm = "all",
    profile: opt.Profile = None,
    batch: opt.BatchRange = None,
    length: opt.LengthRange = None,
    workers: opt.Workers = None,
    explain: opt.Explain = False,
) -> None:
    """Export, verify and build what has changed; stops at the first gate that fails."""
    from engines.api import Artifacts
    from engines.pipeline import Asked, make_engines
    from engines.proof.saved import read
    from engines.show.proof import tables
    from engines.show.summary import summary_table

    folder = folder or default_artifacts(checkpoint)
    asked = Asked(
        checkpoint,
        folder,
        tuple(precisions(precision) or ()),
        target=target,
        sms=sm,
        names=names(profile),
        batch=numbers(batch, "--batch", 3),
        length=numbers(length, "--length", 3),
    )
    with measured("engines") as run, progress() as told:
        made = make_engines(asked, told, workers=workers)
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
