"""ldlm convert: bring in a checkpoint whose tensors have other names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engines.cli._shared import measured, say
from ldlm import files
from ldlm.errors import TokenizerError


def command(
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.")],
    target: Annotated[Path, typer.Argument(help="Checkpoint folder to write.")],
    keymap: Annotated[Path, typer.Option("--map", help="Mapping file, TOML; see docs/model.md.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json to put in; default: made for the vocabulary."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an older checkpoint.")] = False,
) -> None:
    """Rename, join, split and transpose tensors into a checkpoint; strict both ways."""
    from ldlm import checkpoint
    from ldlm import keymap as keymaps
    from ldlm import tokenizer as tokenizers

    checkpoint.require_new(target, force=force)
    mapping = keymaps.read_map(keymap)
    if tokenizer is None:
        chosen = tokenizers.create(mapping.config)
    else:
        text = files.read_text(tokenizer, TokenizerError, "tokenizer")
        chosen = tokenizers.parse(text, mapping.config)
    with measured("convert"):
        keymaps.convert(source, mapping, target, chosen.to_str())
    say(f"{target}")
