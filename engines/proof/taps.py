"""Where does a graph leave the model? Every equation of every block, file against PyTorch.

formula     the file (a half file with rounding switched off) in ONNX Runtime against float32
            PyTorch with the same rounded weights: finds the first equation that is another one
rounding    the half file in the evaluator against float32 PyTorch: shows where precision is lost
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from engines.evaluator.graph import Evaluator
from engines.proof.gates import FORMULA_L2, STANDS_OUT
from engines.proof.graphs import save_graph, scratch
from engines.proof.questions import Question
from engines.proof.records import Measurement, TapReport
from engines.proof.subject import Subject, against
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array, named
from export.equations import tapped, tapped_graph
from export.passes.widen import widen
from export.stages import StageSpec
from ldlm.errors import GraphCheckError

CASE = (2, 17)


def look(subject: Subject) -> Iterator[TapReport | Measurement]:
    """Compare every tap of a stage; a file with other operators gives a report that fails.

    The report on the formula comes with its gate: no equation may differ. Rounding has none.

    Args:
        subject: the traced stage of a component.

    Raises:
        DiskSpaceError: the disk is full.
    """
    subject = subject.at(CASE)
    spec, config = subject.spec, subject.model.config
    try:
        graph, outputs = tapped_graph(subject.paths[spec.name], subject.lowered, spec, config)
    except GraphCheckError as error:
        first = f"{error.details['tensor']}: {error.details.get('got', 'nothing')}"
        yield _report(subject, "formula", {}, first)
        yield _gate(subject, {}, first)
        return
    (inputs,) = subject.inputs.values()
    feeds = named(spec, inputs)

    def errors(got: Mapping[str, Array], reference: torch.nn.Module) -> dict[str, float]:
        taps = torch_taps(reference, spec, inputs).items()
        return {tap: against(got[outputs[tap]], array).relative_l2 for tap, array in taps}

    others = []
    if not subject.precision.is_float32:
        rounding = errors(Evaluator(graph.graph).run(feeds), spec.torch(subject.model))
        eps = torch.finfo(getattr(torch, subject.precision.products)).eps
        first_lost = first_to_stand_out(rounding, eps)
        others.append(_report(subject, "rounding", rounding, first_lost))
        widen(graph)
    with scratch() as folder:
        wide = OrtStage(save_graph(graph, folder / "taps.onnx"), spec, config)
        formula = errors(wide.run(feeds, list(outputs.values())), subject.unrounded().module)
    first_other = first_to_stand_out(formula, FORMULA_L2 / STANDS_OUT)
    yield _report(subject, "formula", formula, first_other)
    yield _gate(subject, formula, first_other)
    yield from others


def _report(
    subject: Subject,
    about: Literal["formula", "rounding"],
    errors: Mapping[str, float],
    first: str | None,
) -> TapReport:
    (case,) = subject.cases
    return TapReport(subject.spec.name, str(subject.precision), about, case, errors, first)


def _gate(subject: Subject, errors: Mapping[str, float], first: str | None) -> Measurement:
    (case,) = subject.cases
    worst = first or max(errors, key=errors.__getitem__)
    distance = errors.get(worst, math.inf)
    return subject.measurement(Question.TAPS, case, distance, FORMULA_L2, tensor=worst)


def torch_taps(
    module: torch.nn.Module, spec: StageSpec, inputs: tuple[Array, ...]
) -> dict[str, Array]:
    """Every tap of a stage's module in PyTorch, by its full name."""
    with tapped(module, spec.component) as names, torch.inference_mode():
        _, *tensors = module(*(torch.from_numpy(array) for array in inputs))
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def first_to_stand_out(errors: Mapping[str, float], floor: float) -> str | None:
    """The first tap whose error is many times that of every tap before it, if one is.

    Args:
        errors: in the order of computation.
        floor: what counts as no error at all.
    """
    highest = floor
    for name, error in errors.items():
        if not error <= STANDS_OUT * highest:
            return name
        highest = max(highest, error)
    return None
