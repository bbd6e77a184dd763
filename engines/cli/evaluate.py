"""ldlm evaluate: the quality of the text, in every runtime and precision."""

from engines.artifacts import folder as folders
from engines.artifacts.manifest import QUALITY
from engines.cli import options as opt
from engines.cli._shared import measured, progress, show


def command(
    folder: opt.Folder,
    checkpoint: opt.Origin,
    judge: opt.Judge,
    precision: opt.ExportedPrecisions = None,
    runtime: opt.Runtimes = "ort,evaluator",
    samples: opt.Samples = 1000,
    steps: opt.Steps = None,
    solver: opt.Solver = "ddpm",
    seed: opt.Seed = 0,
    length: opt.Length = None,
    batch_size: opt.BatchSize = 16,
    as_json: opt.Json = False,
) -> None:
    """Sample the same noise everywhere, and count what a judge accepts."""
    from ldlm.sampler import SampleRequest

    manifest = folders.load(folder)
    request = SampleRequest(
        samples=samples,
        length=manifest.config.n_positions if length is None else length,
        batch_size=batch_size,
        steps=steps,
        solver=solver,
        seed=seed,
    ).of(manifest.config)
    from engines.proof.saved import write_json
    from engines.quality.evaluate import evaluate, load_judge
    from engines.show.findings import quality_table

    chosen = manifest.precisions() if precision is None else opt.precisions(precision)
    folders.require_origin(manifest, checkpoint)
    verdict = load_judge(judge)
    with measured("evaluate") as run, progress() as tell:
        document = evaluate(
            folder, manifest, checkpoint, chosen, request, verdict, tell, opt.names(runtime)
        )
    show(document, quality_table(document), as_json=as_json)
    write_json(folder / QUALITY, document)  # after it was shown: it may be that it cannot be
    with folders.updated(folder) as manifest:
        manifest.runs["evaluate"] = run
