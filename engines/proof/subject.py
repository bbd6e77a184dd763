"""What the questions of the proof are put to: one stage in one precision, and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.proof.compare import Comparison, compare
from engines.proof.gates import FORMULA_L2
from engines.proof.records import Line
from export.precision import Precision
from export.stages import StageSpec
from ldlm.model import LDLM

Array = NDArray[Any]

Case = tuple[int, int]


# In a line, in place of a case: measured over all of them together.
ALL: Case = (0, 0)


@dataclass(frozen=True)
class Subject:
    """One stage in one precision, and what float32 PyTorch says about it.

    Attributes:
        paths: the graph to compare under "graph", the token ids' graph under "ids", and what
            `engines.proof.loop` asks of, by the stages' names.
        weights: "given" or "stress", for the lines.
        inputs, expected: per case.
        exact_limit: how far two float32 computations of the formula may be apart.
    """

    model: LDLM
    spec: StageSpec
    precision: Precision
    weights: str
    paths: Mapping[str, Path]
    inputs: Mapping[Case, tuple[Array, ...]]
    expected: Mapping[Case, Array]
    exact_limit: float = FORMULA_L2

    def line(self, question: str, case: Case, distance: float | Comparison, limit: float) -> Line:
        """A line about this subject."""
        measured = distance.relative_l2 if isinstance(distance, Comparison) else distance
        detail = distance if isinstance(distance, Comparison) else None
        where = (self.spec.name, str(self.precision), self.weights, question)
        return Line(*where, *case, measured, limit, detail)


def pooled(got: Mapping[Case, Array], reference: Mapping[Case, Array]) -> Comparison:
    """One distance over all cases: a handful of values at length 1 is no measure of rounding."""
    return against(*(np.concatenate([x[c].ravel() for c in reference]) for x in (got, reference)))


def against(got: Array, reference: Array) -> Comparison:
    """`compare`, where the reference may be what overflows."""
    if np.all(np.isfinite(reference)):
        return compare(got, reference)
    return Comparison(np.inf, np.inf, np.inf, 0.0, int(np.sum(~np.isfinite(got))), got.size)
