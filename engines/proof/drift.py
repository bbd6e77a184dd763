"""The whole sampler: the same noise through every runtime, and how far they drift apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.proof.baseline import torchs_own
from engines.proof.gates import DRIFT_FLOAT32, precision_limit
from engines.proof.questions import SAMPLER, Question
from engines.proof.records import Drift, Measurement
from engines.proof.subject import Subject
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
    model: LDLM,
    graphs: Mapping[str, Mapping[str, Path]],
    *,
    steps: int,
    length: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement | Drift]:
    """Sample texts per precision with the noise of seed 0, and compare with float32 PyTorch.

    Half precisions run in the evaluator, others in ONNX Runtime. All but float32 are held to what
    PyTorch's own means make of the same noise; see `engines.proof.baseline`.

    Args:
        model: the checkpoint, float32.
        graphs: of the stages of `SAMPLED`, by precision and by name.
        steps, length: of the sampler.
        progress: told what is being done.

    Returns:
        Of each precision: DRIFT (float32: the root mean square over the steps of the estimates'
        relative L2; others: its median over all steps, texts and positions), DRIFT_TOKENS (the
        share of tokens that differ; all but float32's held to PyTorch's share), and the relative
        L2 at every step.
    """
    request = SampleRequest(length=length, samples=TEXTS, batch_size=TEXTS, steps=steps)
    progress("sampler: reference")
    reference = _run(model.config, [TorchStage(model, stage(s)) for s in SAMPLED], request)
    for name, paths in graphs.items():
        progress(f"sampler: {name}")
        precision = Precision.of(name)
        parts = [Subject(model, stage(sampled), precision, paths) for sampled in SAMPLED]
        limit, allowed = _limits(parts, request, reference)
        runners = [part.runner(part.spec.name) for part in parts]
        run = _run(model.config, runners, request, precision.is_integer)
        curve = _relative(run, reference).tolist()
        over_steps = float(np.sqrt(np.mean(np.square(curve))))
        distance = over_steps if precision.is_float32 else typical(run, reference)
        case = (TEXTS, length)
        yield Measurement(SAMPLER, name, "given", Question.DRIFT, *case, distance, limit)
        differ = _differ(run, reference)
        yield Measurement(SAMPLER, name, "given", Question.DRIFT_TOKENS, *case, differ, allowed)
        yield Drift(name, tuple(curve))


def _limits(
    parts: Sequence[Subject], request: SampleRequest, reference: Trace
) -> tuple[float, float]:
    """Of DRIFT and DRIFT_TOKENS."""
    model, precision = parts[0].model, parts[0].precision
    if precision.is_float32:
        return DRIFT_FLOAT32, 0.0
    own = [torchs_own(model, part.spec, precision) for part in parts]
    peer = _run(model.config, own, request)
    # A share of few tokens is coarse: one more per text than PyTorch's is no finding.
    allowed = _differ(peer, reference) + TEXTS / peer.tokens.size
    return precision_limit(typical(peer, reference)), allowed


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


def _differ(run: Trace, reference: Trace) -> float:
    """The share of tokens that differ."""
    return float(np.mean(run.tokens != reference.tokens))


def typical(run: Trace, reference: Trace) -> float:
    """The median over steps, texts and positions of the relative L2; infinite where one is."""
    each = _relative(run, reference, axis=-1)
    return float(np.median(each)) if np.all(np.isfinite(each)) else float("inf")


def _relative(run: Trace, reference: Trace, axis: int | None = None) -> Array:
    """The relative L2 of the estimates at every step: of all of them, or along an axis."""
    pairs = zip(run.estimates, reference.estimates, strict=True)
    norm = np.linalg.norm
    return np.array([norm(a - b, axis=axis) / norm(b, axis=axis) for a, b in pairs])
