"""ldlm inspect: what an artifact is."""

from __future__ import annotations

from engines.artifacts.manifest import json_schema
from engines.cli import options as opt
from engines.cli._shared import out, show
from ldlm.errors import ConfigError


def command(
    path: opt.ToInspect = None, as_json: opt.Json = False, schema: opt.Schema = False
) -> None:
    """Show an artifacts folder, any ONNX file or an engine."""
    from engines.artifacts.inspect import describe
    from engines.show.summary import description_table

    if schema:
        out.print_json(data=json_schema())
        return
    if path is None:
        raise ConfigError("nothing to inspect", expected="a path, or --schema")
    document = describe(path)
    show(document, lambda: description_table(path, document), as_json=as_json)
