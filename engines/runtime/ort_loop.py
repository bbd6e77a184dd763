"""The sampler's loop on ONNX Runtime: one bound call per step, and nothing else on the host.

The state and the step's number go to and fro between two sets of buffers, so that no step allocates
or copies. The modulations of all steps are computed before the loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from engines.runtime.ort import OrtStage
from engines.runtime.step_tables import Part, parts
from export.stages import checked_feeds
from ldlm.noise import NoiseStream
from ldlm.sampler import Run, Tick
from ldlm.solvers import StepTable

Array = NDArray[Any]


@dataclass(frozen=True)
class Tables:
    """A part of the steps as `denoiser_step` reads it."""

    part: Part
    modulations: Array


# What a step hands to the next: input and output.
STATE = {"x": "x_next", "x0_prev": "x0_hat", "step": "next_step"}


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
        self._memories: dict[tuple[int, ...], Buffers] = {}

    def __call__(self, table: StepTable) -> Run:
        """Compute the tables of every step; see `ldlm.sampler.Loop`.

        The run raises StageInputError for a batch or length that the graph was not made for.
        """
        tables = [Tables(part, self._conditioning(part.t)) for part in parts(table)]
        memories = self._memories

        def run(noise: NoiseStream, tick: Tick) -> Array:
            if noise.shape not in memories:
                memories[noise.shape] = Buffers(self._step, noise.shape, tables[0])
            buffers = memories[noise.shape]
            buffers.begin(noise)
            for item in tables:
                buffers.read(item)
                for row in range(item.part.steps):
                    if item.part.draws(row):
                        buffers.draw(noise)
                    started = time.perf_counter()
                    buffers.call()
                    self.inside += time.perf_counter() - started
                    tick()
            return buffers.state()

        return run


class Buffers:
    """The memory of one batch on the provider's device, bound to the step's inputs and outputs.

    There are two bindings: one reads the first of each pair of state buffers and writes the
    second, the other the reverse. Addresses never change, so that CUDA graphs can be replayed.

    Args:
        step: the graph.
        shape: (B, T, d).
        first: tables of the size that will be read.

    Raises:
        StageInputError: the graph does not take the shape.
    """

    def __init__(self, step: OrtStage, shape: tuple[int, ...], first: Tables) -> None:
        self._session = step.session
        self._noise = np.zeros(shape, np.float32)
        arrays: dict[str, Array] = {
            "x": self._noise,
            "x0_prev": self._noise,
            "step": np.zeros(1, np.int64),
            "modulations": first.modulations,
            "coefficients": first.part.coefficients,
            "noise": self._noise,
        }
        checked_feeds(step.spec, step.config, step.ranges, list(arrays.values()))

        def value(name: str) -> ort.OrtValue:
            # A copy: on the CPU the value would otherwise be the array itself.
            return ort.OrtValue.ortvalue_from_numpy(arrays[name].copy(), step.device, 0)

        self._inputs = {name: value(name) for name in ("modulations", "coefficients", "noise")}
        self._state = {name: (value(name), value(name)) for name in STATE}
        self._bindings = [self._bound(source) for source in (0, 1)]
        self._options = [step.run_options() for _ in self._bindings]
        self._turn = 0

    def begin(self, noise: NoiseStream) -> None:
        """Take the first state from the noise."""
        self._turn = 0
        noise.draw(self._noise)
        self._state["x"][0].update_inplace(self._noise)
        self._state["x0_prev"][0].update_inplace(np.zeros_like(self._noise))

    def read(self, tables: Tables) -> None:
        """Let the next calls read these tables, from their first row."""
        self._inputs["modulations"].update_inplace(tables.modulations)
        self._inputs["coefficients"].update_inplace(tables.part.coefficients)
        self._state["step"][self._turn].update_inplace(np.zeros(1, np.int64))

    def draw(self, noise: NoiseStream) -> None:
        """Give the next call noise of its own."""
        noise.draw(self._noise)
        self._inputs["noise"].update_inplace(self._noise)

    def call(self) -> None:
        """One step, with the next row of the tables."""
        turn = self._turn
        self._session.run_with_iobinding(self._bindings[turn], self._options[turn])
        self._turn = 1 - turn

    def state(self) -> Array:
        """The latents x after the last call, on the host."""
        return np.array(self._state["x"][self._turn].numpy())

    def _bound(self, source: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, output in STATE.items():
            binding.bind_ortvalue_input(name, self._state[name][source])
            binding.bind_ortvalue_output(output, self._state[name][1 - source])
        return binding
