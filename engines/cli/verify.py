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
    sampler_steps: Annotated[
        int,
        typer.Option(help="Also sample with this many steps on every runtime; 0 leaves it out."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print parity.json.")] = False,
) -> None:
    """Compare every graph with the reference model; exits with 1 if a gate fails."""
    manifest = manifests.load(folder)
    from engines.proof.drift import drift
    from engines.proof.selftest import require_noticed, self_test
    from engines.proof.verify import verify
    from engines.report import drift_table, islands_table, parity_table, self_test_table
    from engines.runtime.load import require_origin
    from ldlm.model import LDLM

    chosen = precisions(precision) if precision is not None else None
    with measured("verify") as run, spinner() as progress:
        model = LDLM.from_checkpoint(require_origin(manifest, checkpoint))
        exported = list(dict.fromkeys(entry.precision for entry in manifest.graphs))
        parity = verify(folder, manifest, model, chosen or exported, progress, stress=stress)
        outcomes = (
            self_test(folder, manifest, model, chosen or exported, progress) if damage else []
        )
        if sampler_steps:
            lines, parity.drift = drift(
                folder, manifest, model, chosen or exported,
                steps=sampler_steps, length=min(16, manifest.config.n_positions),
                progress=progress,
            )  # fmt: skip
            parity.lines += lines
    document = parity.save(folder, manifest)
    with manifests.updated(folder) as manifest:
        manifest.runs["verify"] = run
    if as_json:
        out.print_json(json.dumps(document))
    else:
        out.print(islands_table(document))
        out.print(parity_table(document))
        if document["drift"]:
            out.print(drift_table(document))
        if outcomes:
            out.print(self_test_table(outcomes))
    parity.require_passed()
    require_noticed(outcomes)
