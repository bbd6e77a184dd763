"""ldlm verify: the artifacts against PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from engines.artifacts import folder as folders
from engines.artifacts.digests import Digests
from engines.artifacts.manifest import Manifest
from engines.cli._shared import ArtifactsFolder, err, measured, out, precisions, spinner
from engines.proof.records import Extra, Parity, read, reasons
from engines.tensorrt.library import LIBRARIES
from export.precision import Precision
from ldlm.errors import ConfigError


def command(
    folder: ArtifactsFolder,
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
    runtime: Annotated[
        str,
        typer.Option(help="rtx or trt: also compare the engines, on the GPU at hand."),
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Also verify what has not changed since it passed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print parity.json.")] = False,
) -> None:
    """Compare every graph with the reference model; exits with 1 if a gate fails.

    What has not changed since it passed is not measured again.
    """
    if runtime and runtime not in LIBRARIES:
        raise ConfigError(
            "no engines of this runtime", expected=" or ".join(LIBRARIES), got=runtime
        )
    extra = Extra(stress, damage, taps, ablate, sampler_steps, runtime)
    document, parity = measure(folder, checkpoint, precision, extra, again=again)
    if as_json:
        out.print_json(json.dumps(document))
    else:
        show(document)
    if parity is not None:
        parity.require_passed()


def measure(
    folder: Path, checkpoint: Path, precision: str | None, extra: Extra, *, again: bool = False
) -> tuple[dict[str, Any] | None, Parity | None]:
    """parity.json, and the proof where something had to be measured."""
    manifest = folders.load(folder)
    digests = Digests(folder)
    folders.require_origin(manifest, checkpoint, digests.of)
    digests.save()
    document = read(folder)
    chosen = precisions(precision) if precision is not None else _exported(manifest, extra)
    stale = []
    for name in chosen:
        why = ("asked again",) if again else reasons(document, manifest, name, extra)
        if why:
            stale.append(name)
            err.print(f"verify {name}: {'; '.join(why)}", highlight=False, markup=False)
    parity = None
    if stale:
        from engines.proof.verify import verify
        from ldlm.model import LDLM

        with measured("verify") as run, spinner() as progress:
            model = LDLM.from_checkpoint(checkpoint)
            parity = verify(folder, manifest, model, stale, progress, extra)
        document = parity.save(folder, manifest)
        with folders.updated(folder) as manifest:
            manifest.runs["verify"] = run
    else:
        err.print("nothing has changed since this was verified (ldlm verify --again measures anew)")
    return document, parity


def _exported(manifest: Manifest, extra: Extra) -> list[str]:
    """Every exported precision that is fit for what is asked; who is left out is said."""
    found = manifest.precisions()
    if not (extra.self_test or extra.taps or extra.runtime):
        return found
    floats = [name for name in found if not Precision.of(name).is_integer]
    left_out = [name for name in found if name not in floats]
    if floats and left_out:
        err.print(f"left out: {', '.join(left_out)}, which this is not for", highlight=False)
    return floats or found


def show(document: dict[str, Any] | None) -> None:
    """All tables of a proof."""
    from engines.show.proof import tables

    for table in tables(document or {}):
        out.print(table)
