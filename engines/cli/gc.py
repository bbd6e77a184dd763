"""ldlm gc: what in an artifacts folder belongs to nothing any more."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from engines.cli._shared import ArtifactsFolder, out, say


def command(
    folder: ArtifactsFolder,
    precision: Annotated[
        str | None, typer.Option(help="In place of leftovers: the graphs and engines of this one.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it; without this it is only listed.")
    ] = False,
) -> None:
    """List, or delete, files that the manifest does not speak of and what killed runs left."""
    from engines.artifacts.collect import collect, drop, leftovers

    if precision is not None:
        found = drop(folder, precision, delete=delete)
    else:
        found = collect(folder) if delete else leftovers(folder)
    if found:
        table = Table(title="deleted" if delete else "would be deleted with --delete")
        table.add_column("file", overflow="fold")
        table.add_column("MB", justify="right")
        table.add_column("why")
        for item in found:
            path = item.path.relative_to(folder).as_posix()
            table.add_row(path, f"{item.bytes / 1e6:,.1f}", item.reason)
        out.print(table)
    total = sum(item.bytes for item in found) / 1e6
    say(f"{folder}: {len(found)} files, {total:,.1f} MB")
