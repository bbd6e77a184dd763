"""ldlm build: ONNX graphs to TensorRT engines."""

from engines.cli import options as opt
from engines.cli._shared import measured, out, progress, record, say
from engines.show.summary import decisions_table, summary_table
from engines.tensorrt.targets import RTX


def command(
    folder: opt.Folder,
    precision: opt.ExportedPrecisions = None,
    target: opt.Target = RTX,
    sm: opt.Sm = "all",
    profile: opt.Profiles = None,
    batch: opt.BatchRange = None,
    length: opt.LengthRange = None,
    unfused: opt.Unfused = False,
    explain: opt.Explain = False,
) -> None:
    """Compile the engines that have changed, and show what the folder holds."""
    from engines.api import Artifacts

    artifacts = Artifacts(folder)
    with measured("build") as run, progress() as tell:
        decisions = artifacts.build(
            None if precision is None else opt.precisions(precision),
            target=target,
            sms=sm,
            names=None if profile is None else opt.names(profile),
            batch=opt.limits(batch, "--batch"),
            length=opt.limits(length, "--length"),
            unfused=unfused,
            progress=tell,
        )
    done = record(folder, "build", decisions, run)
    if explain:
        out.print(decisions_table("build", decisions))
    out.print(summary_table(folder, artifacts.manifest))
    say(f"{folder}: {done}")
