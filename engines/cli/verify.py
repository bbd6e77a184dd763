"""ldlm verify: the artifacts against PyTorch."""

from engines.cli import options as opt
from engines.cli._shared import err, progress, say, say_measured, show
from engines.proof.questions import ProofOptions
from engines.proof.update import update
from engines.show.proof import tables
from engines.tensorrt.library import LIBRARIES
from ldlm.errors import ConfigError


def command(
    folder: opt.Folder,
    checkpoint: opt.Origin,
    precision: opt.ExportedPrecisions = None,
    stress: opt.Stress = False,
    self_test: opt.SelfTest = False,
    taps: opt.Taps = False,
    ablate: opt.Ablate = False,
    sampler_steps: opt.SamplerSteps = 0,
    stage: opt.Stages = None,
    runtime: opt.EngineRuntime = "",
    again: opt.Again = False,
    as_json: opt.Json = False,
) -> None:
    """Compare every graph with the reference model; exits with 1 if a gate fails.

    What has not changed since it passed is not measured again.
    """
    if runtime and runtime not in LIBRARIES:
        raise ConfigError(
            "no engines of this runtime", expected=" or ".join(LIBRARIES), got=runtime
        )
    with progress() as tell:
        found = update(
            folder,
            checkpoint,
            None if precision is None else opt.precisions(precision),
            ProofOptions(stress, self_test, taps, ablate, sampler_steps, runtime),
            stages=stage,
            again=again,
            progress=tell,
            say=lambda text: say(text, err),
        )
    if found.new.scopes:
        say_measured("verify", found.run)
    show(found.proof, *tables(found.proof), as_json=as_json)
    found.save()  # after it was shown: it may be that it cannot be written
    found.new.require_passed()
