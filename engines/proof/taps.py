"""Where does a graph leave the model? Every equation of every block, file against PyTorch.

formula     the file (a half file with rounding switched off) in ONNX Runtime against float32
            PyTorch with the same rounded weights: finds the first equation that is another one
rounding    the half file in the evaluator against float32 PyTorch: shows where precision is lost
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from engines.evaluator.graph import Evaluator
from engines.proof.gates import FORMULA_L2, STANDS_OUT
from engines.proof.questions import Question
from engines.proof.records import Measurement, TapReport
from engines.proof.stage import rounding_off
from engines.proof.subject import Subject, against
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array, named
from export.equations import tapped, tapped_graph
from export.stages import StageSpec
from ldlm.errors import GraphCheckError

CASE = (2, 17)


def look(subject: Subject) -> Iterator[TapReport | Measurement]:
    """Compare every tap of a traced stage; a file with other operators gives a report that fails.

    Raises:
        DiskSpaceError: the disk is full.
    """
    subject.tell("taps")
    subject = subject.at(CASE)
    spec, config, precision = subject.spec, subject.model.config, subject.precision
    ((case, inputs),) = subject.inputs.items()
    try:
        graph, outputs = tapped_graph(subject.paths[spec.name], subject.lowered, spec, config)
    except GraphCheckError as error:
        first = f"{error.details['tensor']}: {error.details.get('got', 'nothing')}"
        yield from _gated(TapReport(spec.name, str(precision), "formula", case, {}, first))
        return

    def report(
        about: Literal["formula", "rounding"],
        got: Mapping[str, Array],
        reference: torch.nn.Module,
        floor: float,
    ) -> TapReport:
        taps = torch_taps(reference, spec, inputs).items()
        errors = {tap: against(got[outputs[tap]], array).relative_l2 for tap, array in taps}
        first = first_to_stand_out(errors, floor)
        return TapReport(spec.name, str(precision), about, case, errors, first)

    reports, feeds = [], named(spec, inputs)
    if not precision.is_float32:
        rounded = Evaluator(graph.graph).run(feeds)
        eps = torch.finfo(getattr(torch, precision.products)).eps
        reports.append(report("rounding", rounded, spec.torch(subject.model), eps))
    with rounding_off(graph) as path:
        wide = OrtStage(path, spec, config).run(feeds, list(outputs.values()))
    module = subject.unrounded().module
    yield from _gated(report("formula", wide, module, FORMULA_L2 / STANDS_OUT))
    yield from reports


def _gated(report: TapReport) -> Iterator[TapReport | Measurement]:
    """A report on the formula, and its gate: no equation may differ."""
    yield report
    errors = {tap: math.inf if e is None else e for tap, e in report.errors.items()}
    name = report.first or max(errors, key=errors.__getitem__)
    found = (Question.TAPS, *report.case, report.errors.get(name), FORMULA_L2)
    yield Measurement(report.stage, report.precision, "given", *found, tensor=name)


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
