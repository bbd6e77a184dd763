"""ldlm verify: the artifacts against PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engines import manifest as manifests
from engines.cli._shared import measured, out, precisions, spinner


def command(
    folder: Annotated[Path, typer.Argument(help="Artifacts folder.")],
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint folder they were made from.")],
    precision: Annotated[
        str | None, typer.Option(help="Precisions, comma-separated; default: every exported one.")
    ] = None,
    stress: Annotated[
        bool, typer.Option("--stress", help="Also prove a copy with outliers and large scores.")
    ] = False,
    damage: Annotated[
        bool,
        typer.Option("--self-test", help="Damage the graphs in every known way; see who notices."),
    ] = False,
    taps: Annotated[
        bool, typer.Option("--taps", help="Also compare every equation of every block.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also measure the stages without their islands.")
    ] = False,
    sampler_steps: Annotated[
        int,
        typer.Option(help="Also sample with this many steps on every runtime; 0 leaves it out."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print parity.json.")] = False,
) -> None:
    """Compare every graph with the reference model; exits with 1 if a gate fails."""
    manifest = manifests.load(folder)
    from engines.proof.parity import read
    from engines.proof.tables import tables
    from engines.proof.verify import Extra, verify
    from engines.runtime.load import require_origin
    from ldlm.model import LDLM

    read(folder)  # a damaged proof is found before time is spent on a new one
    chosen = precisions(precision) if precision is not None else manifest.precisions()
    extra = Extra(stress, damage, taps, ablate, sampler_steps)
    with measured("verify") as run, spinner() as progress:
        model = LDLM.from_checkpoint(require_origin(manifest, checkpoint))
        parity = verify(folder, manifest, model, chosen, progress, extra)
    document = parity.save(folder, manifest)
    with manifests.updated(folder) as manifest:
        manifest.runs["verify"] = run
    if as_json:
        out.print_json(json.dumps(document))
    else:
        for table in tables(document):
            out.print(table)
    parity.require_passed()
