"""A loop's steps in parts, as many as one table of modulations holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.stages import TABLE_STEPS
from ldlm.solvers import StepTable

Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class Part:
    """Up to TABLE_STEPS steps; rows past `steps` are not used.

    Attributes:
        steps: how many there are.
        t: [TABLE_STEPS], the times, as `conditioning` takes them.
        coefficients: [TABLE_STEPS, 3], A, B and C, as `denoiser_step` takes them.
    """

    steps: int
    t: Float32s
    coefficients: Float32s

    def draws(self, row: int) -> bool:
        """Whether a step adds noise; one that does not reads none from the stream."""
        return bool(self.coefficients[row, 2])


def parts(table: StepTable) -> list[Part]:
    """All steps of a table, in order."""
    return [_part(table, first) for first in range(0, len(table), TABLE_STEPS)]


def _part(table: StepTable, first: int) -> Part:
    rows = slice(first, first + TABLE_STEPS)
    steps = len(table.t[rows])
    t = np.ones(TABLE_STEPS, np.float32)
    coefficients = np.zeros((TABLE_STEPS, 3), np.float32)
    t[:steps] = table.t[rows]
    for column, values in enumerate((table.A, table.B, table.C)):
        coefficients[:steps, column] = values[rows]
    return Part(steps, t, coefficients)
