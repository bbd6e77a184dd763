"""ldlm evaluate: the quality of the text, in every runtime and precision."""

from __future__ import annotations

from engines.artifacts import folder as folders
from engines.artifacts.manifest import QUALITY
from engines.cli import options as opt
from engines.cli._shared import measured, names, precisions, progress, show


def command(
    folder: opt.ArtifactsFolder,
    checkpoint: opt.MadeFrom,
    judge: opt.Judge,
    precision: opt.Precisions = None,
    runtime: opt.Runtimes = "ort,evaluator",
    samples: opt.Samples = 1000,
    n_steps: opt.Steps = None,
    solver: opt.Solver = "ddpm",
    seed: opt.Seed = 0,
    length: opt.MostLength = None,
    batch_size: opt.BatchSize = 16,
    as_json: opt.Json = False,
) -> None:
    """Sample the same noise everywhere, and count what a judge accepts."""
    from ldlm.sampler import SampleRequest

    manifest = folders.load(folder)
    config = manifest.config
    request = SampleRequest(
        length=config.n_positions if length is None else length,
        samples=samples,
        batch_size=batch_size,
        steps=n_steps,
        solver=solver,
        seed=seed,
    ).of(config)
    from engines.proof.saved import write_json
    from engines.quality.evaluate import evaluate, report
    from engines.quality.judge import load_judge
    from engines.show.quality import quality_table

    chosen = precisions(precision) or manifest.precisions()
    folders.require_origin(manifest, checkpoint)
    verdict = load_judge(judge)
    with measured("evaluate") as run, progress() as told:
        runtimes = names(runtime) or []
        rows = evaluate(folder, manifest, checkpoint, chosen, request, verdict, told, runtimes)
    document = report(manifest, rows, request)
    show(document, lambda: quality_table(document), as_json=as_json)
    write_json(folder / QUALITY, document)  # after it was shown: it may be that it cannot be
    with folders.updated(folder) as manifest:
        manifest.runs["evaluate"] = run
