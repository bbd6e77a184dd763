"""ldlm export: a checkpoint to ONNX graphs."""

from engines.cli import options as opt
from engines.cli._shared import default_artifacts, measured, out, progress, record, say
from engines.show.summary import decisions_table


def command(
    checkpoint: opt.Checkpoint,
    folder: opt.Out = None,
    precision: opt.Precisions = "fp32,fp16",
    without_island: opt.WithoutIsland = None,
    explain: opt.Explain = False,
) -> None:
    """Export every stage to ONNX, checked, with a manifest; only what has changed."""
    from engines.api import Artifacts
    from export.precision import Precision

    folder = folder or default_artifacts(checkpoint)
    chosen = [
        Precision.of(name).without(without_island or []) for name in opt.precisions(precision)
    ]
    with measured("export") as run, progress() as tell:
        decisions = Artifacts(folder).export(checkpoint, chosen, tell)
    done = record(folder, "export", decisions, run)
    if explain:
        out.print(decisions_table("export", decisions))
    say(f"{folder}: {done}")
