"""The questions that are put to one stage in one precision; see `engines.proof.questions`."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from engines.evaluator.half import HalfProducts
from engines.proof.gates import (
    AGREEMENT_RATIO,
    KL_RATIO,
    NEAR_TIE_FLOAT32,
    NEAR_TIE_HALF,
    precision_limit,
)
from engines.proof.loop import loop_questions
from engines.proof.questions import Question
from engines.proof.records import Measurement
from engines.proof.subject import ALL, Case, Subject, against, pooled_distance
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.passes.dequantise import dequantise
from export.passes.widen import widen
from export.stages import stage
from ldlm import files


def prove(subject: Subject) -> Iterator[Measurement]:
    """All questions about one subject, which has cases."""
    if not subject.precision.is_float32:
        yield from _formula(subject)
    outputs = subject.outputs(subject.runner(subject.spec.name))
    if subject.precision.is_float32:
        yield from subject.exact(Question.GRAPH, outputs)
    else:
        yield from _rounding(subject, outputs)
    yield from loop_questions(subject)
    yield from _tokens(subject, outputs)


def _formula(subject: Subject) -> Iterator[Measurement]:
    reference = subject.unrounded()
    with rounding_off(ir.load(subject.paths[subject.spec.name])) as path:
        wide = OrtStage(path, subject.spec, subject.model.config)
        for case, arrays in subject.inputs.items():
            distance = against(wide(*arrays), reference(*arrays))
            yield subject.measurement(Question.FORMULA, case, distance, subject.exact_limit)


def _rounding(subject: Subject, outputs: Mapping[Case, Array]) -> Iterator[Measurement]:
    with HalfProducts():
        same_policy = subject.outputs(TorchStage(subject.model, subject.spec, subject.lowered))
    error = subject.baseline_error.relative_l2
    distance, limit = pooled_distance(outputs, same_policy), precision_limit(error)
    yield subject.measurement(Question.GRAPH, ALL, distance, AGREEMENT_RATIO * error)
    yield subject.pooled(Question.PRECISION, outputs, limit)
    if subject.also_in_ort:
        loaded = subject.outputs(subject.in_ort(subject.spec.name))
        yield subject.pooled(Question.FILE, loaded, limit)


def _tokens(subject: Subject, logits: Mapping[Case, Array]) -> Iterator[Measurement]:
    """Of the token decoder: share of ids that are not the logits' argmax, or not PyTorch's."""
    names = [name for name in subject.paths if stage(name).outputs[0].dtype == "int64"]
    for name in names:
        if not subject.precision.is_float32:
            reference = subject.expected
            ours, own = (kl_divergence(reference, x) for x in (logits, subject.baseline))
            yield subject.measurement(Question.KL, ALL, ours, KL_RATIO * own)
        for case, ids in subject.outputs(subject.runner(name)).items():
            wrong = (ids != logits[case].argmax(axis=-1)) | other_choice(subject, case, ids)
            yield subject.measurement(Question.TOKENS, case, float(wrong.mean()), 0.0)


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


def other_choice(subject: Subject, case: Case, ids: Array) -> NDArray[np.bool_]:
    """Where ids [B, T] are not what PyTorch's logits of a case choose, near-ties apart."""
    expected = subject.expected[case]
    if subject.precision.is_float32:
        tie = NEAR_TIE_FLOAT32 * float(np.sqrt(np.mean(np.square(expected))))
    else:
        tie = NEAR_TIE_HALF * subject.baseline_error.max_abs
    chosen = np.take_along_axis(expected, ids[..., None], axis=-1)[..., 0]
    different: NDArray[np.bool_] = ~(expected.max(axis=-1) - chosen <= tie)
    return different


@contextlib.contextmanager
def rounding_off(graph: ir.Model) -> Iterator[Path]:
    """A file, for a while, in which every tensor is float32; weights keep their rounded values.

    Args:
        graph: changed in place.

    Raises:
        DiskSpaceError: the disk is full.
    """
    widen(graph)
    dequantise(graph)
    constants = (value.const_value for value in graph.graph.initializers.values())
    size = sum(constant.nbytes for constant in constants if constant is not None)
    with files.staging_folder(Path(tempfile.gettempdir())) as folder:
        path = folder / "wide.onnx"
        files.require_space(path, size + (1 << 20))
        with files.disk_errors(path):
            ir.save(graph, path, external_data=f"{path.name}.data")
        yield path
