"""Where does a graph leave the model? Every equation of every block, file against PyTorch.

formula     the file (a half file with rounding switched off) in ONNX Runtime against float32
            PyTorch with the same rounded weights: finds the first equation that is another one
rounding    the half file in the evaluator against float32 PyTorch: shows where precision is lost
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from engines.evaluator.graph import Evaluator
from engines.proof.gates import FORMULA_L2, STANDS_OUT
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.questions import Question
from engines.proof.records import Measurement, TapReport
from engines.proof.stage import save_graph
from engines.proof.subject import against
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array, named
from export.equations import tapped, tapped_graph
from export.passes.widen import widen
from export.precision import Precision, apply, without_rounding
from export.stages import StageSpec
from ldlm import files
from ldlm.errors import GraphCheckError
from ldlm.model import LDLM

CASE = (2, 17)


def measurement(report: TapReport) -> Measurement | None:
    """The gate of a report on the formula: no equation may differ. Rounding has none."""
    if report.about != "formula":
        return None
    errors = {tap: math.inf if e is None else e for tap, e in report.errors.items()}
    name = report.first or max(errors, key=errors.__getitem__)
    found = (Question.TAPS, *report.case, report.errors.get(name), FORMULA_L2)
    return Measurement(report.stage, report.precision, "given", *found, tensor=name)


def look(path: Path, model: LDLM, spec: StageSpec, precision: Precision) -> list[TapReport]:
    """Compare every tap of a stage; a file with other operators gives a report that fails.

    Args:
        path: the .onnx file of a traced stage.
        model: the checkpoint it was made from, float32.
        spec, precision: what it should be.

    Raises:
        DiskSpaceError: the disk is full.
    """
    module = apply(spec.torch(model), spec.component, precision).eval()
    case, where = clamped(CASE, model.config), (spec.name, str(precision))
    try:
        graph, outputs = tapped_graph(path, module, spec, model.config)
    except GraphCheckError as error:
        first = f"{error.details['tensor']}: {error.details.get('got', 'nothing')}"
        return [TapReport(*where, "formula", case, {}, first)]
    inputs = stage_inputs(spec, model.config, *case)

    def report(
        about: Literal["formula", "rounding"],
        got: Mapping[str, Array],
        reference: torch.nn.Module,
        floor: float,
    ) -> TapReport:
        taps = torch_taps(reference, spec, inputs).items()
        errors = {tap: against(got[outputs[tap]], array).relative_l2 for tap, array in taps}
        return TapReport(*where, about, case, errors, first_to_stand_out(errors, floor))

    reports, feeds = [], named(spec, inputs)
    if not precision.is_float32:
        rounded = Evaluator(graph.graph).run(feeds)
        eps = torch.finfo(getattr(torch, precision.products)).eps
        reports.append(report("rounding", rounded, spec.torch(model), eps))
        widen(graph)
        module = without_rounding(module)
    with files.staging_folder(Path(tempfile.gettempdir())) as staging:
        stage = OrtStage(save_graph(graph, staging / "taps.onnx"), spec, model.config)
        wide = stage.run(feeds, list(outputs.values()))
    return [report("formula", wide, module, FORMULA_L2 / STANDS_OUT), *reports]


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
