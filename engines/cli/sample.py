"""ldlm sample: text from an artifacts folder."""

from __future__ import annotations

import json

from engines.cli import options as opt
from engines.cli._shared import out, progress, tell
from ldlm.errors import SamplerError


def command(
    folder: opt.ArtifactsFolder,
    runtime: opt.Runtime = "ort",
    precision: opt.OnePrecision = None,
    provider: opt.Provider = None,
    checkpoint: opt.Reference = None,
    samples: opt.Samples = 1,
    length: opt.Length = None,
    n_steps: opt.Steps = None,
    grid: opt.Grid = None,
    solver: opt.Solver = "euler",
    seed: opt.Seed = 0,
    batch_size: opt.BatchSize = 1,
    plain: opt.Plain = False,
    raw: opt.Raw = False,
    as_json: opt.Json = False,
) -> None:
    """Sample text. The same seed gives the same text in PyTorch and in ONNX Runtime, in float32."""
    from engines.api import Artifacts, SampleRequest

    request = SampleRequest(
        samples=samples,
        length=length,
        batch_size=min(batch_size, samples) if samples > 0 else batch_size,
        steps=n_steps,
        grid=None if grid is None else _times(grid),
        solver=solver,
        seed=seed,
    )
    artifacts = Artifacts(folder)
    request.table(artifacts.config)  # what cannot be sampled is refused before anything is loaded
    loaded = artifacts.sampler(
        runtime, precision, provider=provider, checkpoint=checkpoint, plain=plain
    )
    with loaded as sampler, progress() as told:
        if precision is None and str(sampler.precision) != "fp32":
            tell(f"precision {sampler.precision}")
        run = sampler.run(request)
        for step in run:
            told("sampling", step.done, step.total)
        (ids,) = run.token_ids
        texts = sampler.decode(ids, raw=raw)
    if as_json:
        out.print_json(json.dumps({"token_ids": ids.tolist(), "texts": texts}))
        return
    for index, line in enumerate(texts):
        tell(f"sample {index}, seed {seed}:")
        out.file.write(line + "\n")


def _times(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise SamplerError(
            "the time grid cannot be read", expected="numbers with commas between", got=text
        ) from None
