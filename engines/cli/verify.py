"""ldlm verify: the artifacts against PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from engines.cli._shared import ArtifactsFolder, err, out, precisions, spinner
from engines.proof.questions import NOTHING_MORE, ProofOptions
from engines.proof.update import Update, update
from engines.show.proof import tables
from engines.tensorrt.library import LIBRARIES
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
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Only this stage's component; again for another one. Default: all."),
    ] = None,
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
    options = ProofOptions(stress, damage, taps, ablate, sampler_steps, runtime)
    chosen = precisions(precision) if precision is not None else None
    found = prove(folder, checkpoint, chosen, options, stages=stage, again=again)
    if as_json:
        out.print_json(msgspec.json.encode(found.proof).decode())
    else:
        show(found)
    found.save()  # after it was shown: it may be that it cannot be written
    found.new.require_passed()


def prove(
    folder: Path,
    checkpoint: Path,
    precisions: Sequence[str] | None,
    options: ProofOptions = NOTHING_MORE,
    *,
    stages: Sequence[str] | None = None,
    again: bool = False,
) -> Update:
    """`engines.proof.update.update`, with progress and reasons on stderr."""
    with spinner() as progress:
        found = update(
            folder, checkpoint, precisions, options,
            stages=stages, again=again, progress=progress, say=tell,
        )  # fmt: skip # the items of a row belong together
    if found.new.scopes:
        tell(f"verify: {found.run['seconds']} s, peak memory {found.run['peak_gb']} GB")
    return found


def show(found: Update) -> None:
    """All tables of a proof."""
    for table in tables(found.proof):
        out.print(table)


def tell(text: str) -> None:
    """One plain line on stderr."""
    err.print(text, highlight=False, markup=False)
