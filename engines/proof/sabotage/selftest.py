"""Would we notice? Every gate is run on graphs damaged in every way we know."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from engines.proof import islands
from engines.proof.compare import compare
from engines.proof.gates import FORMULA_L2
from engines.proof.questions import Question
from engines.proof.records import UNDAMAGED, Outcome
from engines.proof.sabotage.damages import DAMAGES, Damage
from engines.proof.stage import rounding_off
from engines.proof.subject import Subject
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array
from export.checks import check_graph
from export.exporter import OPSET
from export.passes.widen import widen
from export.stages import stage
from ldlm import files
from ldlm.errors import ArtifactError, GraphCheckError

CASE = (2, 17)


def self_test(subject: Subject) -> Iterator[Outcome]:
    """Damage a component's exported graphs, one fault at a time, and put the questions to each.

    Three questions: the graph checks of the export, the islands of the policy, and the formula
    (for fp32, the file against PyTorch; for a half precision, with rounding switched off).

    Args:
        subject: in a precision that has it; see `ProofOptions.require_possible`.

    Raises:
        ArtifactError: a damage finds nothing to damage.
    """
    for name in dict.fromkeys(damage.stage for damage in DAMAGES):
        if name in subject.paths:
            subject.tell(f"self-test of {name}")
            yield from _of_stage(replace(subject, spec=stage(name)).at(CASE))


def _of_stage(subject: Subject) -> Iterator[Outcome]:
    name = subject.spec.name
    path = subject.paths[name]
    (expected,) = subject.outputs(subject.unrounded()).values()
    damages = [damage for damage in DAMAGES if damage.stage == name]
    # Damaged graphs stand beside the weights they read, under a name that is swept up.
    beside = path.with_name(f"{files.PARTIAL}{os.getpid()}-{path.name}")
    with rounding_off(ir.load(path)) as wide:
        try:
            for damage in (Damage(UNDAMAGED, name, lambda _: None), *damages):
                noticed = tuple(_noticed(subject, damage, beside, wide, expected))
                yield Outcome(name, str(subject.precision), damage.name, noticed)
        finally:
            beside.unlink(missing_ok=True)


def _noticed(
    subject: Subject, damage: Damage, beside: Path, wide: Path, expected: Array
) -> Iterator[str]:
    spec, precision = subject.spec, subject.precision
    graph = ir.load(subject.paths[spec.name])
    damage.apply(graph)
    ir.save(graph, beside)
    try:
        check_graph(beside, spec, subject.model.config, subject.lowered, precision, OPSET)
    except GraphCheckError:
        yield "checks"
    if not all(record.passed for record in islands.look(beside, spec, precision, tensorrt=False)):
        yield "islands"
    graph = ir.load(wide)
    damage.apply(graph)
    widen(graph)  # what the damage turned to half is for the islands to notice
    ir.save(graph, damaged := wide.with_name("damaged.onnx"))
    if _formula_differs(subject, damaged, expected):
        yield Question.GRAPH if precision.is_float32 else Question.FORMULA


def _formula_differs(subject: Subject, path: Path, expected: Array) -> bool:
    (inputs,) = subject.inputs.values()
    try:
        got = OrtStage(path, subject.spec, subject.model.config)(*inputs)
    except ArtifactError:  # it does not even load
        return True
    if expected.dtype == np.int64:
        return not np.array_equal(got, expected)
    return not compare(got, expected).relative_l2 <= FORMULA_L2
