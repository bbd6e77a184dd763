"""ldlm sample: text from an artifacts folder."""

from engines.cli import options as opt
from engines.cli._shared import err, out, progress, say, show


def command(
    folder: opt.Folder,
    runtime: opt.Runtime = "ort",
    precision: opt.ExportedPrecision = None,
    provider: opt.Provider = None,
    checkpoint: opt.OriginIfAny = None,
    samples: opt.Samples = 1,
    length: opt.Length = None,
    steps: opt.Steps = None,
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

    times = "decreasing numbers with commas between"
    request = SampleRequest(
        samples=samples,
        length=length,
        batch_size=min(batch_size, samples) if samples > 0 else batch_size,
        steps=steps,
        grid=None if grid is None else opt.numbers(grid, float, "the time grid", times),
        solver=solver,
        seed=seed,
    )
    artifacts = Artifacts(folder)
    request.table(artifacts.config)  # what cannot be sampled is refused before anything is loaded
    with artifacts.sampler(
        runtime, precision, provider=provider, checkpoint=checkpoint, plain=plain
    ) as sampler:
        if precision is None and str(sampler.precision) != "fp32":
            say(f"precision {sampler.precision}", err)
        run = sampler.run(request)
        with progress() as tell:
            for step in run:
                tell("sampling", step.done, step.total)
        (ids,) = run.token_ids
        texts = sampler.decode(ids, raw=raw)
    if as_json:
        show({"token_ids": ids.tolist(), "texts": texts}, as_json=True)
        return
    for index, line in enumerate(texts):
        say(f"sample {index}, seed {seed}:", err)
        out.file.write(line + "\n")
