"""ldlm sample: text from an artifacts folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engines.artifacts import folder as folders
from engines.cli._shared import ArtifactsFolder, err, out, steps
from ldlm.errors import SamplerError


def command(
    folder: ArtifactsFolder,
    runtime: Annotated[
        str, typer.Option(help="ort, torch (the reference), evaluator, rtx or trt (the engines).")
    ] = "ort",
    precision: Annotated[str, typer.Option(help="An exported precision.")] = "fp32",
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
    from ldlm.sampler import SampleRequest, sample

    manifest = folders.load(folder)
    config = manifest.config
    request = SampleRequest(
        length=length,
        samples=number,
        batch_size=min(batch_size, number) if number > 0 else batch_size,
        steps=n_steps,
        grid=None if grid is None else _times(grid),
        solver=solver,
        seed=seed,
    ).of(config)
    from engines.runtime.load import load_stages, load_tokenizer
    from ldlm import tokenizer as tokenizers

    tokenizer = load_tokenizer(folder, manifest)
    stages = load_stages(
        folder,
        manifest,
        runtime=runtime,
        precision=precision,
        provider=provider,
        checkpoint=checkpoint,
        plain=plain,
    )
    with steps() as progress:
        ids = sample(stages, request, lambda done, total: progress("sampling", done, total))
    texts = [tokenizers.decode(tokenizer, row, config.end_of_text, raw=raw) for row in ids.tolist()]
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
