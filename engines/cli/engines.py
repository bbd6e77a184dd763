"""ldlm engines: from a checkpoint to verified engines."""

from engines.cli import options as opt
from engines.cli._shared import default_artifacts, measured, out, progress, record, say, show
from engines.show.summary import decisions_table, summary_table
from engines.tensorrt.targets import RTX


def command(
    checkpoint: opt.Checkpoint,
    folder: opt.Out = None,
    precision: opt.Precisions = "fp32,fp16",
    target: opt.Target = RTX,
    sm: opt.Sm = "all",
    profile: opt.Profiles = None,
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

    folder = folder or default_artifacts(checkpoint)
    asked = Asked(
        checkpoint, folder, tuple(opt.precisions(precision)), target, sm,
        None if profile is None else opt.names(profile),
        opt.limits(batch, "--batch"), opt.limits(length, "--length"), workers,
    )  # fmt: skip # the items of a row belong together
    with measured("engines") as run, progress() as tell:
        made = make_engines(asked, tell)
    done = record(folder, "engines", [*made["export"], *made["build"]], run)
    proof = read(folder).content
    verified = sum(bool(decision.reasons) for decision in made["verify"])
    if verified and proof is not None:
        show(proof, *tables(proof))
    if explain:
        out.print(decisions_table("export", made["export"]))
        out.print(decisions_table("build", made["build"]))
    out.print(summary_table(folder, Artifacts(folder).manifest))
    say(f"{folder}: {done}; {verified} verified")
