"""The sampler's loop on ONNX Runtime: one bound call per step, and nothing else on the host.

The state and the step's number go to and fro between two sets of buffers, so that no step allocates
or copies. The modulations of all steps are computed before the loop. Buffers belong to one run at a
time: runs of several threads share the session alone.
"""

import functools
import time
from collections.abc import Generator

import numpy as np
import onnxruntime as ort

from engines.runtime.ort import OrtStage
from engines.runtime.pool import Pool
from engines.runtime.stage import Array
from engines.runtime.step_tables import HANDED_ON, Tables, tables
from ldlm.noise import NoiseStream
from ldlm.sampler import LoopStep, Steps
from ldlm.solvers import StepTable


class OrtLoop:
    """`ldlm.sampler.Loop` over the graphs `conditioning` and `denoiser_step`.

    Args:
        conditioning, step: the two graphs, on one provider.
    """

    def __init__(self, conditioning: OrtStage, step: OrtStage) -> None:
        self._conditioning, self._step = conditioning, step
        self._idle: Pool[tuple[int, ...], Buffers] = Pool()

    def __call__(self, table: StepTable) -> Steps:
        """Compute the tables of every step; see `ldlm.sampler.Loop`.

        The steps raise StageInputError for a batch or length that the graph was not made for.
        """
        return functools.partial(self._steps, tables(table, self._conditioning))

    def _steps(self, steps: list[Tables], noise: NoiseStream) -> Generator[LoopStep, None, None]:
        make = functools.partial(Buffers, self._step, noise.shape, steps[0])
        with self._idle.take(noise.shape, make) as buffers:
            buffers.begin(noise)
            for table in steps:
                buffers.read(table)
                for row in range(table.steps):
                    if table.needs_noise(row):
                        buffers.draw(noise)
                    started = time.perf_counter()
                    buffers.call()
                    seconds = time.perf_counter() - started
                    yield LoopStep(seconds, buffers.state, buffers.estimate)


class Buffers:
    """The memory of one batch on the provider's device, bound to the step's inputs and outputs.

    There are two bindings: one reads the first of each pair of state buffers and writes the
    second, the other the reverse. Addresses never change, so that CUDA graphs can be replayed.

    Args:
        step: the graph.
        shape: (B, T, d).
        first: of the tables that will be read, which are of one size.

    Raises:
        StageInputError: the graph does not take the shape.
    """

    def __init__(self, step: OrtStage, shape: tuple[int, ...], first: Tables) -> None:
        self._stage = step
        self._noise = np.zeros(shape, np.float32)
        names = ("x", "x0_prev", "noise")
        arrays = step.checked({**dict.fromkeys(names, self._noise), **first.inputs})

        def value(name: str) -> ort.OrtValue:
            # A copy: on the CPU the value would otherwise be the array itself.
            return ort.OrtValue.ortvalue_from_numpy(arrays[name].copy(), step.device, 0)

        self._inputs = {name: value(name) for name in ("modulations", "coefficients", "noise")}
        self._state = {name: (value(name), value(name)) for name in HANDED_ON.values()}
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
        values = {**self._inputs, "step": self._state["step"][self._turn]}
        for name, array in tables.inputs.items():
            values[name].update_inplace(array)

    def draw(self, noise: NoiseStream) -> None:
        """Give the next call noise of its own."""
        noise.draw(self._noise)
        self._inputs["noise"].update_inplace(self._noise)

    def call(self) -> None:
        """One step, with the next row of the tables."""
        self._stage.run_bound(self._bindings[self._turn], self._options[self._turn])
        self._turn = 1 - self._turn

    def state(self) -> Array:
        """The latents x after the last call, on the host."""
        return np.array(self._state["x"][self._turn].numpy())

    def estimate(self) -> Array:
        """The estimate x0_hat of the last call, on the host."""
        return np.array(self._state["x0_prev"][self._turn].numpy())

    def _bound(self, source: int) -> ort.IOBinding:
        binding = self._stage.session.io_binding()
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        for output, name in HANDED_ON.items():
            binding.bind_ortvalue_input(name, self._state[name][source])
            binding.bind_ortvalue_output(output, self._state[name][1 - source])
        return binding
