"""ldlm inspect: what an artifact is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engines.artifacts.manifest import json_schema
from engines.cli._shared import out
from ldlm.errors import ConfigError


def command(
    path: Annotated[
        Path | None, typer.Argument(help="Artifacts folder, .onnx or .engine file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of manifest.json.")
    ] = False,
) -> None:
    """Show an artifacts folder, any ONNX file or an engine."""
    from engines.artifacts.inspect import describe
    from engines.show.summary import description_table

    if schema:
        out.print_json(json.dumps(json_schema()))
        return
    if path is None:
        raise ConfigError("nothing to inspect", expected="a path, or --schema")
    document = describe(path)
    if as_json:
        out.print_json(json.dumps(document))
    else:
        out.print(description_table(path, document))
