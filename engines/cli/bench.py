"""ldlm bench: the peers side by side in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engines.artifacts import folder as folders
from engines.cli._shared import ArtifactsFolder, names, out, steps
from ldlm.errors import ConfigError


def command(
    folder: ArtifactsFolder,
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint folder they were made from.")],
    peers: Annotated[
        str | None,
        typer.Option(
            help="torch, torch-bf16, torch-compile, ort-plain, ort, rtx, trt; all but torch's "
            "also as name:precision. The first is what the others are compared with. Default: "
            "those up to ort and, at batch 1 where it was exported, ort:int8."
        ),
    ] = None,
    what: Annotated[
        str, typer.Option(help="step, latent_decoder: one, or both with a comma.")
    ] = "step",
    length: Annotated[
        str | None, typer.Option(help="Lengths; default 64,256,1024 as far as the model goes.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batches.")] = "1",
    rounds: Annotated[int, typer.Option(help="How often the turn goes round.")] = 3,
    seconds: Annotated[float, typer.Option(help="A peer's share of one turn, about.")] = 2.0,
    to: Annotated[Path | None, typer.Option("--out", help="Also write the JSON here.")] = None,
) -> None:
    """Time each peer on the same steps, in turn; the last line is JSON."""
    from engines.bench.measure import bench
    from engines.bench.peers import default_peers
    from engines.bench.worker import Case
    from engines.show.findings import bench_table
    from ldlm import files

    manifest = folders.load(folder)
    config = manifest.config
    default = [n for n in (64, 256, 1024) if n <= config.n_positions] or [config.n_positions]
    lengths = default if length is None else _integers(length, "--length")
    batches = _integers(batch, "--batch")
    cases = [Case(part, b, n) for part in names(what) for b in batches for n in lengths]
    chosen = default_peers(manifest, batches) if peers is None else names(peers)
    with steps() as progress:
        document = bench(
            folder,
            checkpoint,
            chosen,
            cases,
            rounds=rounds,
            seconds=seconds,
            progress=progress,
        )
    text = json.dumps(document)
    out.print(bench_table(document))
    if to is not None:
        files.write_whole(to, (text + "\n").encode())
    out.file.write(text + "\n")


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(item) for item in names(text)]
    except ValueError:
        raise ConfigError(f"{option} is not usable", expected="such as 64,256", got=text) from None
