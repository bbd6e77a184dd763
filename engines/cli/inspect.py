"""ldlm inspect: what an artifact is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from engines.artifacts.manifest import json_schema
from engines.cli._shared import out, say
from ldlm.errors import ConfigError


def command(
    path: Annotated[
        Path | None, typer.Argument(help="Artifacts folder, .onnx or .engine file.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option("--diff", help="Show only where this one differs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of manifest.json.")
    ] = False,
) -> None:
    """Show a build, any ONNX file or an engine; or where two of them differ."""
    from engines.artifacts.inspect import describe, differences, flatten

    if schema:
        out.print_json(json.dumps(json_schema()))
        return
    if path is None:
        raise ConfigError("nothing to inspect", expected="a path, or --schema")
    document = describe(path)
    if diff is None:
        if as_json:
            out.print_json(json.dumps(document))
            return
        table = Table(title=str(path), show_header=False)
        rows = [(name, text) for name, text in flatten(document)]
    else:
        found = differences(document, describe(diff))
        if as_json:
            out.print_json(
                json.dumps([dict(zip(("key", "a", "b"), row, strict=True)) for row in found])
            )
            return
        table = Table("", str(path), str(diff), title="differences")
        rows = found  # type: ignore[assignment]
    for row in rows:
        table.add_row(*(Text(text, overflow="fold") for text in row))
    out.print(table)
    if diff is not None:
        say(f"{len(rows)} differences")
