"""ldlm info: the parameter account."""

from engines.cli import options as opt
from engines.cli._shared import show
from ldlm import config as configs


def command(
    checkpoint: opt.CheckpointIfAny = None, preset: opt.Preset = "base", as_json: opt.Json = False
) -> None:
    """Show every component, its calculation, its parameters and the published value."""
    from engines.show.findings import account_table
    from ldlm.account import account
    from ldlm.checkpoint import WEIGHTS, read_config, read_header, require_tensors
    from ldlm.model import skeleton

    if checkpoint is None:
        config = configs.preset(preset)
    else:
        config = read_config(checkpoint)
        weights = checkpoint / WEIGHTS
        require_tensors(read_header(weights), skeleton(config).shapes(), weights)
    lines = account(config)
    show(lines, account_table(lines), as_json=as_json)
