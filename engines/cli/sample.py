"""ldlm sample: text from an artifacts folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engines.cli._shared import ArtifactsFolder, err, out, steps
from ldlm.errors import SamplerError


def command(
    folder: ArtifactsFolder,
    runtime: Annotated[
        str, typer.Option(help="ort, torch (the reference), evaluator, rtx or trt (the engines).")
    ] = "ort",
    precision: Annotated[
        str | None, typer.Option(help="An exported precision; default fp32, or the first there.")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="cpu or cuda, for ort; default cpu.")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder: the artifacts must have been made from it."),
    ] = None,
    number: Annotated[int, typer.Option("--samples", "-n", help="Number of texts.")] = 1,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text; default 64, or the model's most.")
    ] = None,
    n_steps: Annotated[
        int | None, typer.Option("--steps", help="Denoiser calls; default the model's own.")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Decreasing times in (0, 1], comma-separated, not --steps.")
    ] = None,
    solver: Annotated[str, typer.Option(help="euler, ddpm or ddim.")] = "euler",
    seed: Annotated[int, typer.Option(help="Seed; text k depends on it and on k alone.")] = 0,
    batch_size: Annotated[
        int, typer.Option(help="Texts that run together; int8 takes each by itself.")
    ] = 1,
    plain: Annotated[
        bool, typer.Option("--plain", help="The plain graphs, step by step; ort alone.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Show all tokens, past the end too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print token ids and texts.")] = False,
) -> None:
    """Sample text. The same seed gives the same text in PyTorch and in ONNX Runtime, in float32."""
    from engines.api import Artifacts, SampleRequest

    request = SampleRequest(
        samples=number,
        length=length,
        batch_size=min(batch_size, number) if number > 0 else batch_size,
        steps=n_steps,
        grid=None if grid is None else _times(grid),
        solver=solver,
        seed=seed,
    )
    artifacts = Artifacts(folder)
    request.table(artifacts.config)  # what cannot be sampled is refused before anything is loaded
    with artifacts.sampler(
        runtime, precision, provider=provider, checkpoint=checkpoint, plain=plain
    ) as sampler:
        if precision is None and str(sampler.precision) != "fp32":
            err.print(f"precision {sampler.precision}", highlight=False)
        run = sampler.run(request)
        with steps() as progress:
            for step in run:
                progress("sampling", step.done, step.total)
        (ids,) = run.token_ids
        texts = sampler.decode(ids, raw=raw)
    if as_json:
        out.print_json(json.dumps({"token_ids": ids.tolist(), "texts": texts}))
        return
    for index, line in enumerate(texts):
        err.print(f"sample {index}, seed {seed}:", highlight=False)
        out.file.write(line + "\n")


def _times(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise SamplerError(
            "the time grid cannot be read", expected="numbers with commas between", got=text
        ) from None
