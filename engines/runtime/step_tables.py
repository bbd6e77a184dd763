"""A loop's steps in chunks, each as long as one table of modulations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.stages import TABLE_STEPS
from ldlm.solvers import StepTable

Float32s = NDArray[np.float32]


@dataclass(frozen=True)
class Chunk:
    """Up to TABLE_STEPS steps; rows past `steps` are not used.

    Attributes:
        steps: how many there are.
        t: [TABLE_STEPS], the times, as `conditioning` takes them.
        coefficients: [TABLE_STEPS, 3], A, B and C, as `denoiser_step` takes them.
    """

    steps: int
    t: Float32s
    coefficients: Float32s

    def needs_noise(self, row: int) -> bool:
        """Whether a step adds noise; one that does not reads none from the stream."""
        return bool(self.coefficients[row, 2])


def chunks(table: StepTable) -> list[Chunk]:
    """All steps of a table, in order."""
    found = []
    for first in range(0, len(table), TABLE_STEPS):
        columns = [values[first : first + TABLE_STEPS] for values in (table.A, table.B, table.C)]
        steps = len(columns[0])
        t, coefficients = np.ones(TABLE_STEPS, np.float32), np.zeros((TABLE_STEPS, 3), np.float32)
        t[:steps] = table.t[first : first + TABLE_STEPS]
        coefficients[:steps] = np.stack(columns, axis=1)
        found.append(Chunk(steps, t, coefficients))
    return found
