"""Where does a graph leave the model? Every equation of every block, file against PyTorch.

formula     the file (a half file with rounding switched off) in ONNX Runtime against float32
            PyTorch with the same rounded weights: finds the first equation that is another one
rounding    the half file in the evaluator against float32 PyTorch: shows where precision is lost
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from engines.artifacts.manifest import Manifest
from engines.evaluator.graph import Evaluator
from engines.proof.gates import FORMULA_L2, STANDS_OUT
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.records import Line
from engines.proof.stage import save_graph
from engines.proof.subject import against
from engines.runtime.ort import OrtStage
from engines.runtime.stage import named
from export.equations import tapped, tapped_graph
from export.passes.widen import widen
from export.precision import Precision, apply, without_rounding
from export.stages import StageSpec, compared
from ldlm import files
from ldlm.errors import GraphCheckError
from ldlm.model import LDLM

Array = NDArray[Any]

CASE = (2, 17)


@dataclass(frozen=True)
class TapReport:
    """One stage in one precision, one question.

    Attributes:
        case: (batch, length) of the inputs.
        errors: relative L2 per tap, in the order of computation; empty if the file has other
            operators than the model.
        first: the first tap that stands out from all before it, if one does; or where the
            operators begin to differ.
    """

    stage: str
    precision: str
    question: str
    case: tuple[int, int]
    errors: dict[str, float]
    first: str | None

    def line(self) -> Line | None:
        """The gate: no equation of the formula may differ."""
        if self.question != "formula":
            return None
        name = self.first or max(self.errors, key=lambda name: self.errors[name])
        where = (self.stage, self.precision, "given", "taps")
        error = self.errors.get(name, math.inf)
        return Line(*where, *self.case, error, FORMULA_L2, tensor=name)


def look(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: list[str],
    parts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> list[TapReport]:
    """Compare every tap of every stage.

    A file with other operators than the model exports to gives a report that fails.

    Args:
        folder, manifest, model, precisions, progress: as for `engines.proof.verify.verify`.
        parts: components.

    Raises:
        ArtifactError: a graph was not exported, or its files have changed.
    """
    reports = []
    for part in parts:
        spec = compared(part)
        for name in precisions:
            entry = manifest.graph(name, spec.name)
            progress(f"{part} {name}, taps")
            reports += _stage(entry.verified(folder), model, spec, name)
    return reports


def _stage(path: Path, model: LDLM, spec: StageSpec, precision: str) -> list[TapReport]:
    policy = Precision.of(precision)
    module = apply(spec.torch(model), spec.component, policy).eval()
    case = clamped(CASE, model.config)
    try:
        graph, outputs = tapped_graph(path, module, spec, model.config)
    except GraphCheckError as error:
        where = f"{error.details['tensor']}: {error.details.get('got', 'nothing')}"
        return [TapReport(spec.name, precision, "formula", case, {}, where)]
    inputs = stage_inputs(spec, model.config, *case)
    reports = []
    if not policy.is_float32:
        rounded = Evaluator(graph.graph).run(named(spec, inputs))
        got = {tap: rounded[name] for tap, name in outputs.items()}
        reference = torch_taps(spec.torch(model), spec, inputs)
        reports.append(_report(spec, precision, "rounding", case, got, reference))
        widen(graph)
        module = without_rounding(module)
    with files.staging_folder(Path(tempfile.gettempdir())) as staging:
        stage = OrtStage(save_graph(graph, staging / "taps.onnx"), spec, model.config)
        arrays = stage.run(named(spec, inputs), list(outputs.values()))
    got = {tap: arrays[name] for tap, name in outputs.items()}
    return [
        _report(spec, precision, "formula", case, got, torch_taps(module, spec, inputs)),
        *reports,
    ]


def torch_taps(
    module: torch.nn.Module, spec: StageSpec, inputs: tuple[Array, ...]
) -> dict[str, Array]:
    """Every tap of a stage's module in PyTorch, by its full name."""
    with tapped(module, spec.component) as names, torch.inference_mode():
        _, *tensors = module(*(torch.from_numpy(array) for array in inputs))
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def _report(
    spec: StageSpec,
    precision: str,
    question: str,
    case: tuple[int, int],
    got: Mapping[str, Array],
    reference: Mapping[str, Array],
) -> TapReport:
    errors = {tap: against(got[tap], reference[tap]).relative_l2 for tap in reference}
    floor = FORMULA_L2 / STANDS_OUT
    if question == "rounding":
        dtype = Precision.of(precision).products
        floor = torch.finfo(getattr(torch, dtype)).eps
    first = first_to_stand_out(errors, floor)
    return TapReport(spec.name, precision, question, case, errors, first)


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
