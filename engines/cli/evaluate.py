"""ldlm evaluate: the quality of the text, in every runtime and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from engines.artifacts import folder as folders
from engines.artifacts.manifest import QUALITY
from engines.cli._shared import ArtifactsFolder, measured, names, out, precisions, steps


def command(
    folder: ArtifactsFolder,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint folder they were made from.")],
    judge: Annotated[
        Path, typer.Option(help="Python file with accepts(text) and seen(); it is executed.")
    ],
    precision: Annotated[
        str | None, typer.Option(help="Precisions, comma-separated; default: every exported one.")
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="Runtimes beside PyTorch, comma-separated; rtx and trt on a GPU.")
    ] = "ort,evaluator",
    number: Annotated[int, typer.Option("--samples", "-n", help="Number of texts.")] = 1000,
    n_steps: Annotated[
        int | None, typer.Option("--steps", help="Denoiser calls; default the model's own.")
    ] = None,
    solver: Annotated[str, typer.Option(help="euler, ddpm or ddim.")] = "ddpm",
    seed: Annotated[int, typer.Option(help="Of the noise, the same for every run.")] = 0,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text; default the model's most.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Texts that run together; int8 takes each by itself.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print quality.json.")] = False,
) -> None:
    """Sample the same noise everywhere, and count what a judge accepts."""
    from ldlm.sampler import SampleRequest

    manifest = folders.load(folder)
    config = manifest.config
    request = SampleRequest(
        length=config.n_positions if length is None else length,
        samples=number,
        batch_size=batch_size,
        steps=n_steps,
        solver=solver,
        seed=seed,
    ).of(config)
    from engines.proof.saved import write_json
    from engines.quality.evaluate import evaluate
    from engines.quality.judge import load_judge
    from engines.show.findings import quality_table

    chosen = precisions(precision) if precision is not None else manifest.precisions()
    folders.require_origin(manifest, checkpoint)
    verdict = load_judge(judge)
    with measured("evaluate") as run, steps() as progress:
        document = evaluate(
            folder, manifest, checkpoint, chosen, request, verdict, progress, names(runtime)
        )
    if as_json:
        out.print_json(msgspec.json.encode(document).decode())
    else:
        out.print(quality_table(document))
    write_json(folder / QUALITY, document)  # after it was shown: it may be that it cannot be
    with folders.updated(folder) as manifest:
        manifest.runs["evaluate"] = run
