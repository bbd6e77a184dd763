"""The questions that are put to one stage in one precision; see `engines.proof.questions`."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from engines.evaluator.half import HalfProducts
from engines.proof import loop
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
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.passes.dequantise import dequantise
from export.passes.widen import widen
from export.precision import apply, without_rounding
from ldlm import files


def prove(subject: Subject) -> list[Measurement]:
    """All questions about one subject."""
    found = _float32(subject) if subject.precision.is_float32 else _rounded(subject)
    return list(found)


def _float32(subject: Subject) -> Iterator[Measurement]:
    outputs = subject.outputs(subject.in_ort(subject.spec.name))
    yield from subject.exact(Question.GRAPH, outputs)
    yield from loop.float32_questions(subject)
    if (ids_spec := subject.ids_spec) is not None:
        for case, ids in subject.outputs(subject.in_ort(ids_spec.name)).items():
            tie = NEAR_TIE_FLOAT32 * float(np.sqrt(np.mean(np.square(subject.expected[case]))))
            yield _tokens(subject, case, ids, outputs[case], tie)


def _rounded(subject: Subject) -> Iterator[Measurement]:
    precision, spec, expected = subject.precision, subject.spec, subject.expected
    module = apply(spec.torch(subject.model), spec.component, precision)
    yield from _formula(subject, without_rounding(module))

    peer = subject.peer()
    outputs = subject.outputs(subject.runner(spec.name))
    with HalfProducts():
        same_policy = subject.outputs(TorchStage(subject.model, spec, module))
    theirs = pooled(peer, expected)
    distance, limit = pooled(outputs, same_policy), precision_limit(theirs.relative_l2)
    yield subject.measurement(Question.GRAPH, ALL, distance, AGREEMENT_RATIO * theirs.relative_l2)
    yield subject.pooled(Question.PRECISION, outputs, limit)
    in_ort = precision.is_half and precision.runs_on("ort")
    if in_ort:
        yield subject.pooled(Question.FILE, subject.outputs(subject.in_ort(spec.name)), limit)
    yield from loop.rounded_questions(subject, peer, in_ort)
    if (ids_spec := subject.ids_spec) is not None:
        ours, allowed = (kl_divergence(expected, logits) for logits in (outputs, peer))
        yield subject.measurement(Question.KL, ALL, ours, KL_RATIO * allowed)
        for case, ids in subject.outputs(subject.runner(ids_spec.name)).items():
            yield _tokens(subject, case, ids, outputs[case], NEAR_TIE_HALF * theirs.max_abs)


def float64_limit(subject: Subject) -> float:
    """What two float32 computations may be apart, from float32's own distance from float64."""
    exact = copy.deepcopy(subject.spec.torch(subject.model)).double()
    with torch.inference_mode():
        outputs = subject.outputs(
            lambda *arrays: exact(*(torch.from_numpy(a).double() for a in arrays)).numpy()
        )
    errors = [compare(subject.expected[case], outputs[case]).relative_l2 for case in outputs]
    return max(FORMULA_L2, FLOAT64_RATIO * max(errors))


def kl_divergence(reference: Mapping[Case, Array], logits: Mapping[Case, Array]) -> float:
    """Mean over all positions of KL(softmax(reference) || softmax(logits)), in float64."""
    each = []
    for case, expected in reference.items():
        if not np.all(np.isfinite(logits[case])):
            return float("inf")
        arrays = (expected, logits[case])
        log_p, log_q = (torch.from_numpy(x).double().log_softmax(-1) for x in arrays)
        each.append((log_p.exp() * (log_p - log_q)).sum(-1).ravel())
    return float(torch.cat(each).mean())


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
    spec, model = subject.spec, subject.model
    reference = TorchStage(model, spec, module)
    with files.staging_folder(Path(tempfile.gettempdir())) as staging:
        path = rounding_off(subject.paths[spec.name], staging / "wide.onnx")
        wide = OrtStage(path, spec, model.config)
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
