"""The questions that are put to one stage in one precision; see `engines.proof.questions`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from engines.evaluator.half import HalfProducts
from engines.proof import loop
from engines.proof.baseline import runner, torchs_own
from engines.proof.compare import compare
from engines.proof.gates import (
    AGREEMENT_RATIO,
    FLOAT64_RATIO,
    FORMULA_L2,
    KL_RATIO,
    NEAR_TIE_FLOAT32,
    NEAR_TIE_HALF,
    precision_limit,
)
from engines.proof.questions import Question
from engines.proof.records import Measurement
from engines.proof.subject import ALL, Case, Subject, against, pooled
from engines.runtime.ort import OrtStage
from engines.runtime.torch import TorchStage
from export import precision as policies
from export.passes.dequantise import dequantise
from export.passes.widen import widen
from export.stages import StageSpec
from ldlm import files
from ldlm.model import LDLM

Array = NDArray[Any]


def prove(subject: Subject) -> list[Measurement]:
    """All questions about one subject."""
    found = _float32(subject) if subject.precision.is_float32 else _rounded(subject)
    return list(found)


def _float32(subject: Subject) -> Iterator[Measurement]:
    stage = OrtStage(subject.paths[subject.spec.name], subject.spec, subject.model.config)
    outputs = {case: stage(*arrays) for case, arrays in subject.inputs.items()}
    for case, got in outputs.items():
        distance = compare(got, subject.expected[case])
        yield subject.measurement(Question.GRAPH, case, distance, subject.exact_limit)
    yield from loop.float32_questions(subject)
    if (ids_spec := subject.ids_spec) is not None:
        ids = OrtStage(subject.paths[ids_spec.name], ids_spec, subject.model.config)
        for case, arrays in subject.inputs.items():
            reference = subject.expected[case]
            tie = NEAR_TIE_FLOAT32 * float(np.sqrt(np.mean(np.square(reference))))
            yield _tokens(subject, case, ids(*arrays), outputs[case], tie)


def _rounded(subject: Subject) -> Iterator[Measurement]:
    precision = subject.precision
    spec, model = subject.spec, subject.model
    module = policies.apply(spec.torch(model), spec.component, precision)
    yield from _formula(subject, policies.without_rounding(module))

    peer = peer_outputs(subject)
    path = subject.paths[spec.name]
    stage = runner(path, spec, model.config, precision)
    policy = TorchStage(model, spec, module)
    outputs = {case: stage(*arrays) for case, arrays in subject.inputs.items()}
    with HalfProducts():
        same_policy = {case: policy(*arrays) for case, arrays in subject.inputs.items()}
    theirs = pooled(peer, subject.expected)
    error = theirs.relative_l2
    distance = pooled(outputs, same_policy)
    yield subject.measurement(Question.GRAPH, ALL, distance, AGREEMENT_RATIO * error)
    limit = precision_limit(error)
    yield subject.measurement(Question.PRECISION, ALL, pooled(outputs, subject.expected), limit)
    in_ort = precision.is_half and precision.runs_on("ort")
    if in_ort:
        loaded = OrtStage(path, spec, model.config)
        file = {case: loaded(*arrays) for case, arrays in subject.inputs.items()}
        yield subject.measurement(Question.FILE, ALL, pooled(file, subject.expected), limit)
    yield from loop.rounded_questions(subject, peer, in_ort)
    if (ids_spec := subject.ids_spec) is not None:
        kl = {
            name: kl_divergence(subject.expected, got)
            for name, got in (("ours", outputs), ("theirs", peer))
        }
        yield subject.measurement(Question.KL, ALL, kl["ours"], KL_RATIO * kl["theirs"])
        ids = runner(subject.paths[ids_spec.name], ids_spec, model.config, precision)
        for case, arrays in subject.inputs.items():
            tie = NEAR_TIE_HALF * theirs.max_abs
            yield _tokens(subject, case, ids(*arrays), outputs[case], tie)


def float64_limit(
    model: LDLM,
    spec: StageSpec,
    inputs: Mapping[Case, tuple[Array, ...]],
    expected: Mapping[Case, Array],
) -> float:
    """What two float32 computations may be apart, from float32's own distance from float64."""
    exact = copy.deepcopy(spec.torch(model)).double()
    with torch.inference_mode():
        outputs = {
            case: exact(*(torch.from_numpy(a).double() for a in arrays)).numpy()
            for case, arrays in inputs.items()
        }
    errors = [compare(expected[case], outputs[case]).relative_l2 for case in inputs]
    return max(FORMULA_L2, FLOAT64_RATIO * max(errors))


def peer_outputs(subject: Subject) -> dict[Case, Array]:
    """What PyTorch's own means make of a subject's precision; see `engines.proof.baseline`.

    Raises:
        ParityError: nothing was rounded, so that the comparison would mean nothing.
    """
    call = torchs_own(subject.model, subject.spec, subject.precision)
    return {case: call(*arrays) for case, arrays in subject.inputs.items()}


def kl_divergence(reference: Mapping[Case, Array], logits: Mapping[Case, Array]) -> float:
    """Mean over all positions of KL(softmax(reference) || softmax(logits)), in float64."""
    each = []
    for case, expected in reference.items():
        if not np.all(np.isfinite(logits[case])):
            return float("inf")
        log_p, log_q = (_log_softmax(x.astype(np.float64)) for x in (expected, logits[case]))
        each.append(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1).ravel())
    return float(np.mean(np.concatenate(each)))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _tokens(subject: Subject, case: Case, ids: Array, logits: Array, tie: float) -> Measurement:
    """Share of ids that are not the logits' argmax, or differ from PyTorch's by no near-tie."""
    reference = subject.expected[case]
    wrong = (ids != logits.argmax(axis=-1)) | other_choice(reference, ids, tie)
    return subject.measurement(Question.TOKENS, case, float(wrong.mean()), 0.0)


def other_choice(reference: Array, ids: Array, tie: float) -> NDArray[np.bool_]:
    """Where ids [B, T] are not what logits [B, T, vocab] choose, near-ties apart."""
    chosen = np.take_along_axis(reference, ids[..., None], axis=-1)[..., 0]
    different: NDArray[np.bool_] = ~(reference.max(axis=-1) - chosen <= tie)
    return different


def _formula(subject: Subject, module: torch.nn.Module) -> Iterator[Measurement]:
    reference = TorchStage(subject.model, subject.spec, module)
    with files.staging_folder(Path(tempfile.gettempdir())) as staging:
        path = rounding_off(subject.paths[subject.spec.name], staging / "wide.onnx")
        wide = OrtStage(path, subject.spec, subject.model.config)
        for case, arrays in subject.inputs.items():
            distance = against(wide(*arrays), reference(*arrays))
            yield subject.measurement(Question.FORMULA, case, distance, subject.exact_limit)


def rounding_off(path: Path, target: Path) -> Path:
    """Write a graph with every tensor in float32, its weights keeping their rounded values.

    Raises:
        DiskSpaceError: the disk is full.
    """
    graph = ir.load(path)
    widen(graph)
    dequantise(graph)
    return save_graph(graph, target)


def save_graph(graph: ir.Model, target: Path) -> Path:
    """Write a graph with its weights beside it.

    Raises:
        DiskSpaceError: the disk is full.
    """
    constants = (value.const_value for value in graph.graph.initializers.values())
    files.require_space(target, sum(c.nbytes for c in constants if c is not None) + (1 << 20))
    with files.disk_errors(target):
        ir.save(graph, target, external_data=f"{target.name}.data")
    return target
