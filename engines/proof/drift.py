"""The whole sampler: the same noise through every runtime, and how far they drift apart."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engines.proof.baseline import torchs_own
from engines.proof.gates import DRIFT_FLOAT32, precision_limit
from engines.proof.questions import SAMPLER, Question
from engines.proof.records import Drift, Measurement
from engines.proof.subject import Subject
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.stages import SAMPLED, stage
from ldlm.config import LDLMConfig
from ldlm.sampler import DenoiserLoop, Run, SampleRequest, Stages

# Texts that are sampled. Where the choice of a token tips over in one of them, any difference grows
# by a factor of hundreds, ours or PyTorch's: a mean over steps and texts then compares luck.
TEXTS = 4
LENGTH = 16


@dataclass(frozen=True)
class Trace:
    """One sampling run: the denoiser's estimates of all texts at every step, and the tokens."""

    estimates: list[Array]
    tokens: Array


def drift(subject: Subject, steps: int, length: int = LENGTH) -> Iterator[Measurement | Drift]:
    """Sample texts with the noise of seed 0, and compare with float32 PyTorch.

    Half precisions run in the evaluator, others in ONNX Runtime. All but float32 are held to what
    PyTorch's own means make of the same noise; see `engines.proof.baseline`.

    Args:
        subject: with the graphs of all stages in `SAMPLED`.
        steps, length: of the sampler; fewer tokens where the model has no positions for them.

    Returns:
        DRIFT (float32: the root mean square over the steps of the estimates' relative L2;
        others: its median over all steps, texts and positions), DRIFT_TOKENS (the share of
        tokens that differ; all but float32's held to PyTorch's share), and the relative L2 at
        every step.
    """
    model, precision = subject.model, subject.precision
    length = min(length, model.config.n_positions)
    request = SampleRequest(length=length, samples=TEXTS, batch_size=TEXTS, steps=steps)
    specs = [stage(name) for name in SAMPLED]
    reference = _run(model.config, [TorchStage(model, spec) for spec in specs], request)
    runners = [subject.runner(spec.name) for spec in specs]
    run = _run(model.config, runners, request, precision.is_integer)
    curve = _relative(run, reference).tolist()
    differ = float(np.mean(run.tokens != reference.tokens))
    if precision.is_float32:
        distance, limit, allowed = float(np.sqrt(np.mean(np.square(curve)))), DRIFT_FLOAT32, 0.0
    else:
        own = [torchs_own(model, spec, precision) for spec in specs]
        baseline = _run(model.config, own, request)
        distance, limit = typical(run, reference), precision_limit(typical(baseline, reference))
        # A share of few tokens is coarse: one more per text than PyTorch's is no finding.
        share = float(np.mean(baseline.tokens != reference.tokens))
        allowed = share + TEXTS / reference.tokens.size
    where = (SAMPLER, str(precision), subject.checkpoint)
    yield Measurement(*where, Question.DRIFT, TEXTS, length, distance, limit)
    yield Measurement(*where, Question.DRIFT_TOKENS, TEXTS, length, differ, allowed)
    yield Drift(str(precision), tuple(curve))


def _run(
    config: LDLMConfig,
    stages: Sequence[Callable[..., Array]],
    request: SampleRequest,
    one_at_a_time: bool = False,  # as `Stages`: what is measured is what is sampled
) -> Trace:
    denoiser, latents, tokens = stages
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
