"""The whole sampler: the same noise through every runtime, and how far they drift apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engines.manifest import Manifest
from engines.proof.evaluator import EvaluatorStage
from engines.proof.gates import AUTOCAST_RATIO, DRIFT_FLOAT32
from engines.proof.half import HalfProducts
from engines.proof.parity import SAMPLER, Line
from engines.runtime.ort import OrtStage
from engines.runtime.torch_stage import TorchStage
from export import precision as policies
from export.stages import DEPLOYED, stage
from ldlm.model import LDLM
from ldlm.sampler import SampleRequest, Stages, sample
from ldlm.schedule import TangentSchedule

Array = NDArray[Any]


@dataclass(frozen=True)
class Run:
    """One sampling run: the denoiser's estimate at every step, and the tokens."""

    estimates: list[Array]
    tokens: Array


def drift(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: list[str],
    *,
    steps: int,
    length: int,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Line], dict[str, list[float]]]:
    """Sample one text per precision with the noise of seed 0, and compare with float32 PyTorch.

    Half precisions run in the evaluator and are held to PyTorch's autocast on the same noise;
    float32 runs in ONNX Runtime.

    Returns:
        Lines "drift" (root mean square over the steps of the estimates' relative L2) and "drift
        tokens" (the share of tokens that differ; in a half precision held to autocast's share),
        and the drift at every step per precision.
    """
    request = SampleRequest(
        d_model=model.config.d_model,
        length=length,
        steps=steps,
        schedule=TangentSchedule(model.config.tangent_d, model.config.t_min),
    )
    progress("sampler: reference")
    torch_stages = {name: TorchStage(model, stage(name)) for name in DEPLOYED}
    reference = _run(torch_stages, request)
    lines: list[Line] = []
    curves: dict[str, list[float]] = {}
    for name in precisions:
        progress(f"sampler: {name}")
        if name == "fp32":
            runtime: Mapping[str, Callable[..., Array]] = {
                s: OrtStage.from_artifacts(folder, manifest, s, name) for s in DEPLOYED
            }
            limit, share = DRIFT_FLOAT32, 0.0
        else:
            dtype = getattr(torch, policies.product_dtype(policies.policy(name)))
            autocast = _run(torch_stages, request, HalfProducts(dtype))
            limit = AUTOCAST_RATIO * _over_steps(_distances(autocast, reference))
            share = float(np.mean(autocast.tokens != reference.tokens))
            runtime = {
                s: EvaluatorStage(manifest.graph(name, s).verified(folder), stage(s))
                for s in DEPLOYED
            }
        run = _run(runtime, request)
        curves[name] = _distances(run, reference)
        where = (SAMPLER, name, "given")
        lines.append(Line(*where, "drift", 1, length, _over_steps(curves[name]), limit))
        differ = float(np.mean(run.tokens != reference.tokens))
        # A share of few tokens is coarse: one token more than autocast is no finding.
        allowed = share + (1 / length if name != "fp32" else 0.0)
        lines.append(Line(*where, "drift tokens", 1, length, differ, allowed))
    return lines, curves


def _run(
    stages: Mapping[str, Callable[..., Array]],
    request: SampleRequest,
    mode: AbstractContextManager[Any] | None = None,
) -> Run:
    estimates: list[Array] = []

    def denoiser(*inputs: Array) -> Array:
        estimates.append(stages["denoiser"](*inputs))
        return estimates[-1]

    with mode or nullcontext():
        decoders = (stages["latent_decoder"], stages["token_decoder"])
        tokens = sample(Stages(denoiser, *decoders), request)
    return Run(estimates, tokens)


def _over_steps(curve: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(curve))))


def _distances(run: Run, reference: Run) -> list[float]:
    pairs = zip(run.estimates, reference.estimates, strict=True)
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
