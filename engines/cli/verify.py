"""ldlm verify: the artifacts against PyTorch."""

from __future__ import annotations

import msgspec

from engines.cli import options as opt
from engines.cli._shared import out, precisions, progress, tell, tell_cost
from engines.proof.questions import ProofOptions
from engines.proof.update import update
from engines.show.proof import tables
from engines.tensorrt.library import LIBRARIES
from ldlm.errors import ConfigError


def command(
    folder: opt.ArtifactsFolder,
    checkpoint: opt.MadeFrom,
    precision: opt.Precisions = None,
    stress: opt.Stress = False,
    damage: opt.SelfTest = False,
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
    options = ProofOptions(stress, damage, taps, ablate, sampler_steps, runtime)
    chosen = precisions(precision)
    with progress() as told:
        found = update(
            folder, checkpoint, chosen, options, stages=stage, again=again, progress=told, say=tell
        )
    if found.new.scopes:
        tell_cost("verify", found.run)
    if as_json:
        out.print_json(msgspec.json.encode(found.proof).decode())
    else:
        for table in tables(found.proof):
            out.print(table)
    found.save()  # after it was shown: it may be that it cannot be written
    found.new.require_passed()
