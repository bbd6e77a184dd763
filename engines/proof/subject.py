"""What the questions of the proof are put to: one stage in one precision, and its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.proof.compare import Comparison, compare
from engines.proof.gates import FORMULA_L2
from engines.proof.questions import Question
from engines.proof.records import Checkpoint, Distances, Measurement
from export.precision import Precision
from export.stages import StageSpec, stage
from ldlm.model import LDLM

Array = NDArray[Any]

Case = tuple[int, int]


# In place of a case: measured over all of them together.
ALL: Case = (0, 0)


@dataclass(frozen=True)
class Subject:
    """One stage in one precision, and what float32 PyTorch says about it.

    Attributes:
        spec: the traced stage of a component.
        paths: the graphs of the component's stages, by name.
        inputs, expected: per case.
        exact_limit: how far two float32 computations of the formula may be apart.
    """

    model: LDLM
    spec: StageSpec
    precision: Precision
    checkpoint: Checkpoint
    paths: Mapping[str, Path]
    inputs: Mapping[Case, tuple[Array, ...]]
    expected: Mapping[Case, Array]
    exact_limit: float = FORMULA_L2

    def measurement(
        self, question: Question, case: Case, found: float | Comparison, limit: float
    ) -> Measurement:
        """What was found about this subject."""
        where = (self.spec.name, str(self.precision), self.checkpoint, question)
        if not isinstance(found, Comparison):
            return Measurement(*where, *case, found, limit)
        detail = Distances(**dataclasses.asdict(found))
        return Measurement(*where, *case, found.relative_l2, limit, detail)

    @property
    def ids_spec(self) -> StageSpec | None:
        """The stage of the component that gives token ids, where its graph is there."""
        specs = (stage(name) for name in self.paths)
        return next((spec for spec in specs if spec.outputs[0].dtype == "int64"), None)


def pooled(got: Mapping[Case, Array], reference: Mapping[Case, Array]) -> Comparison:
    """One distance over all cases: a handful of values at length 1 is no measure of rounding."""
    return against(*(np.concatenate([x[c].ravel() for c in reference]) for x in (got, reference)))


def against(got: Array, reference: Array) -> Comparison:
    """`compare`, where the reference may be what overflows."""
    if np.all(np.isfinite(reference)):
        return compare(got, reference)
    return Comparison(np.inf, np.inf, np.inf, 0.0, int(np.sum(~np.isfinite(got))), got.size)
