"""ldlm convert: bring in a checkpoint whose tensors have other names."""

from engines.cli import options as opt
from engines.cli._shared import measured, say
from ldlm import files
from ldlm.errors import TokenizerError


def command(
    source: opt.Weights,
    target: opt.NewCheckpoint,
    keymap: opt.Keymap,
    tokenizer: opt.Tokenizer = None,
    force: opt.Force = False,
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
