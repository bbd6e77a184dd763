"""A loop's steps as `denoiser_step` reads them, in tables of the length that it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from export.stages import TABLE_STEPS
from ldlm.noise import Float32s
from ldlm.solvers import StepTable

# Outputs of a step, and the inputs of the next one that they become.
HANDED_ON = {"x_next": "x", "x0_hat": "x0_prev", "next_step": "step"}


@dataclass(frozen=True)
class Tables:
    """Up to TABLE_STEPS steps; rows past `steps` are not used.

    Attributes:
        steps: how many there are.
        inputs: modulations [TABLE_STEPS, rows, d], coefficients [TABLE_STEPS, 3] (A, B and C), and
            the number of the first row, by the names of the step's inputs.
    """

    steps: int
    inputs: dict[str, Any]

    def needs_noise(self, row: int) -> bool:
        """Whether a step adds noise; one that does not reads none from the stream."""
        return bool(self.inputs["coefficients"][row, 2])


def tables(table: StepTable, modulate: Callable[[Float32s], Any]) -> list[Tables]:
    """All steps of a table, in order.

    Args:
        table: of any length.
        modulate: times [TABLE_STEPS] -> modulations, as the stage `conditioning` computes them.
    """
    found = []
    for first in range(0, len(table), TABLE_STEPS):
        columns = [values[first : first + TABLE_STEPS] for values in (table.A, table.B, table.C)]
        steps = len(columns[0])
        t, coefficients = np.ones(TABLE_STEPS, np.float32), np.zeros((TABLE_STEPS, 3), np.float32)
        t[:steps] = table.t[first : first + TABLE_STEPS]
        coefficients[:steps] = np.stack(columns, axis=1)
        row = np.zeros(1, np.int64)
        inputs = {"modulations": modulate(t), "coefficients": coefficients, "step": row}
        found.append(Tables(steps, inputs))
    return found
