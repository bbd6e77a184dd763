"""ldlm init: a checkpoint with seeded weights."""

from engines.cli import options as opt
from engines.cli._shared import measured, progress, say
from ldlm import config as configs


def command(
    folder: opt.NewCheckpoint,
    preset: opt.Preset = "base",
    seed: opt.WeightsSeed = 0,
    force: opt.Force = False,
) -> None:
    """Write a checkpoint whose every tensor is drawn from a seed.

    No trained weights of the published model are public. These are for building, measuring and
    testing.
    """
    config = configs.preset(preset)
    from ldlm import checkpoint, tokenizer
    from ldlm.initialise import initialise
    from ldlm.model import LDLM

    checkpoint.require_new(folder, force=force)
    with measured("init"), progress() as tell:
        tell("drawing weights")
        model = initialise(LDLM(config), seed)
        model.tokenizer_json = tokenizer.create(config).to_str()
        tell("writing")
        model.save_checkpoint(folder)
    say(f"{folder}: preset {preset}, seed {seed}")
