"""ldlm inspect: what an artifact is."""

from engines.artifacts.manifest import json_schema
from engines.cli import options as opt
from engines.cli._shared import show
from ldlm.errors import ConfigError


def command(
    path: opt.AnyArtifact = None, as_json: opt.Json = False, schema: opt.Schema = False
) -> None:
    """Show an artifacts folder, any ONNX file or an engine."""
    from engines.artifacts.inspect import describe
    from engines.show.summary import description_table

    if schema:
        show(json_schema(), as_json=True)
        return
    if path is None:
        raise ConfigError("nothing to inspect", expected="a path, or --schema")
    document = describe(path)
    show(document, description_table(path, document), as_json=as_json)
