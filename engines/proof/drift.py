"""The whole sampler: the same noise through every runtime, and how far they drift apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.artifacts.manifest import Manifest
from engines.proof.baseline import runner, torchs_own
from engines.proof.gates import DRIFT_FLOAT32, precision_limit
from engines.proof.questions import SAMPLER, Question
from engines.proof.records import Drift, Measurement
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.precision import Precision
from export.stages import SAMPLED, stage
from ldlm.config import LDLMConfig
from ldlm.model import LDLM
from ldlm.sampler import DenoiserLoop, Run, SampleRequest, Stages

# Texts that are sampled. Where the choice of a token tips over in one of them, any difference grows
# by a factor of hundreds, ours or PyTorch's: a mean over steps and texts then compares luck.
TEXTS = 4


@dataclass(frozen=True)
class Trace:
    """One sampling run: the denoiser's estimates of all texts at every step, and the tokens."""

    estimates: list[Array]
    tokens: Array


def drift(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: Sequence[str],
    *,
    steps: int,
    length: int,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Measurement], list[Drift]]:
    """Sample texts per precision with the noise of seed 0, and compare with float32 PyTorch.

    Half precisions run in the evaluator, others in ONNX Runtime. All but float32 are held to what
    PyTorch's own means make of the same noise; see `engines.proof.baseline`.

    Returns:
        DRIFT (float32: the root mean square over the steps of the estimates' relative L2;
        others: its median over all steps, texts and positions) and DRIFT_TOKENS (the share of
        tokens that differ; all but float32's held to PyTorch's share), and the relative L2 at
        every step per precision.
    """
    request = SampleRequest(length=length, samples=TEXTS, batch_size=TEXTS, steps=steps)
    progress("sampler: reference")
    torch_stages = {name: TorchStage(model, stage(name)) for name in SAMPLED}
    reference = _run(model.config, torch_stages, request)
    measurements: list[Measurement] = []
    curves: list[Drift] = []
    for name in precisions:
        progress(f"sampler: {name}")
        precision = Precision.of(name)
        paths = {s: manifest.graph(name, s).verified(folder) for s in SAMPLED}
        runtime = {s: runner(path, stage(s), model.config, precision) for s, path in paths.items()}
        limit, allowed = _limits(model, precision, request, reference)
        run = _run(model.config, runtime, request, precision.is_integer)
        curve = _relative(run, reference).tolist()
        curves.append(Drift(name, tuple(curve)))
        over_steps = float(np.sqrt(np.mean(np.square(curve))))
        measured = over_steps if precision.is_float32 else typical(run, reference)
        differ = float(np.mean(run.tokens != reference.tokens))
        measurements += [
            Measurement(SAMPLER, name, "given", question, TEXTS, length, distance, most)
            for question, distance, most in (
                (Question.DRIFT, measured, limit),
                (Question.DRIFT_TOKENS, differ, allowed),
            )
        ]
    return measurements, curves


def _limits(
    model: LDLM, precision: Precision, request: SampleRequest, reference: Trace
) -> tuple[float, float]:
    """Of DRIFT and DRIFT_TOKENS."""
    if precision.is_float32:
        return DRIFT_FLOAT32, 0.0
    own = {name: torchs_own(model, stage(name), precision) for name in SAMPLED}
    peer = _run(model.config, own, request)
    share = float(np.mean(peer.tokens != reference.tokens))
    # A share of few tokens is coarse: one more per text than PyTorch's is no finding.
    return precision_limit(typical(peer, reference)), share + TEXTS / peer.tokens.size


def _run(
    config: LDLMConfig,
    stages: Mapping[str, Callable[..., Array]],
    request: SampleRequest,
    one_at_a_time: bool = False,  # as `Stages`: what is measured is what is sampled
) -> Trace:
    denoiser, latents, tokens = (stages[name] for name in SAMPLED)
    run = Run(Stages(config, DenoiserLoop(denoiser), latents, tokens, one_at_a_time), request)
    batches = [step.loop.x0_hat() for step in run]
    steps = run.total // (request.samples if one_at_a_time else 1)
    estimates = [np.concatenate(batches[number::steps]) for number in range(steps)]
    return Trace(estimates, run.token_ids[0])


def typical(run: Trace, reference: Trace) -> float:
    """The median over steps, texts and positions of the relative L2; infinite where one is."""
    each = _relative(run, reference, axis=-1)
    return float(np.median(each)) if np.all(np.isfinite(each)) else float("inf")


def _relative(run: Trace, reference: Trace, axis: int | None = None) -> Array:
    """The relative L2 of the estimates at every step: of all of them, or along an axis."""
    pairs = zip(run.estimates, reference.estimates, strict=True)
    norm = np.linalg.norm
    return np.array([norm(a - b, axis=axis) / norm(b, axis=axis) for a, b in pairs])
