"""The sampler's loop on ONNX Runtime: one bound call per step, and nothing else on the host.

The state goes to and fro between two pairs of buffers, so that no step allocates or copies. The
modulations of all steps are computed before the loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.runtime.ort import OrtStage
from export.stages import TABLE_STEPS, checked_feeds
from ldlm.noise import NoiseStream
from ldlm.sampler import Run, Tick
from ldlm.solvers import StepTable

Array = NDArray[Any]


@dataclass(frozen=True)
class Tables:
    """Up to TABLE_STEPS steps as `denoiser_step` reads them; rows past `steps` are not used."""

    steps: int
    modulations: Array
    coefficients: Array


class OrtLoop:
    """`ldlm.sampler.Loop` over the graphs `conditioning` and `denoiser_step`.

    Args:
        conditioning, step: the two graphs, on one provider.

    Attributes:
        inside: seconds spent inside ONNX Runtime's calls of `denoiser_step` so far.
    """

    def __init__(self, conditioning: OrtStage, step: OrtStage) -> None:
        self._conditioning, self._step = conditioning, step
        self.inside = 0.0

    def __call__(self, table: StepTable) -> Run:
        """Compute the tables of every step; see `ldlm.sampler.Loop`.

        The run raises StageInputError for a batch or length that the graph was not made for.
        """
        tables = [self._tables(table, first) for first in range(0, len(table), TABLE_STEPS)]

        def run(noise: NoiseStream, tick: Tick) -> Array:
            buffers = Buffers(self._step, noise, tables[0])
            for part in tables:
                buffers.bind_tables(part)
                for row in range(part.steps):
                    if part.coefficients[row, 2]:
                        noise.draw(buffers.noise)
                    started = time.perf_counter()
                    buffers.call(row)
                    self.inside += time.perf_counter() - started
                    tick()
            return buffers.state

        return run

    def _tables(self, table: StepTable, first: int) -> Tables:
        rows = slice(first, first + TABLE_STEPS)
        t = np.ones(TABLE_STEPS, np.float32)
        coefficients = np.zeros((TABLE_STEPS, 3), np.float32)
        steps = len(table.t[rows])
        t[:steps] = table.t[rows]
        for column, values in enumerate((table.A, table.B, table.C)):
            coefficients[:steps, column] = values[rows]
        return Tables(steps, self._conditioning(t), coefficients)


class Buffers:
    """The memory of one batch, bound to the step's inputs and outputs once in each direction.

    Args:
        step: the graph.
        noise: gives the shape, and the first state.
        first: the tables that will be bound first.

    Raises:
        StageInputError: the graph does not take the shape.
    """

    def __init__(self, step: OrtStage, noise: NoiseStream, first: Tables) -> None:
        self._session = step.session
        self._x = [noise.draw(), np.empty(noise.shape, np.float32)]
        self._x0 = [np.zeros(noise.shape, np.float32), np.empty(noise.shape, np.float32)]
        self._number = np.zeros(1, np.int64)
        self.noise = np.zeros(noise.shape, np.float32)
        self._bindings = [self._bound(source) for source in (0, 1)]
        self._turn = 0
        tables = (first.modulations, first.coefficients)
        inputs = (self._x[0], self._x0[0], self._number, *tables, self.noise)
        checked_feeds(step.spec, step.config, step.ranges, inputs)

    @property
    def state(self) -> Array:
        """The latents x after the last call."""
        return self._x[self._turn]

    def bind_tables(self, tables: Tables) -> None:
        """Let the next calls read these tables."""
        for binding in self._bindings:
            for name in ("modulations", "coefficients"):
                _bind(binding.bind_input, name, getattr(tables, name))

    def call(self, row: int) -> None:
        """One step, with a row of the tables that are bound."""
        self._number[0] = row
        self._session.run_with_iobinding(self._bindings[self._turn])
        self._turn = 1 - self._turn

    def _bound(self, source: int) -> ort.IOBinding:
        """Read the buffers `source`, write the others."""
        binding = self._session.io_binding()
        for name, array in (
            ("x", self._x[source]),
            ("x0_prev", self._x0[source]),
            ("step", self._number),
            ("noise", self.noise),
        ):
            _bind(binding.bind_input, name, array)
        _bind(binding.bind_output, "x_next", self._x[1 - source])
        _bind(binding.bind_output, "x0_hat", self._x0[1 - source])
        return binding


def _bind(bind: Any, name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
