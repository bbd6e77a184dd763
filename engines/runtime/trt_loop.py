"""The sampler's loop on TensorRT: one captured CUDA graph per step, and the state on the device.

The host draws the noise, a step ahead of the device, and launches; it reads nothing back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.runtime.step_tables import Part, parts
from engines.runtime.trt_stage import Sizes, TrtStage
from engines.tensorrt.device import Device, DeviceArray
from export.stages import BATCH, LENGTH, check_inputs
from ldlm.noise import NoiseStream
from ldlm.sampler import Run, Tick
from ldlm.solvers import StepTable

Array = NDArray[Any]

# An output of a step, and the input of the next one that it becomes.
HANDED_ON = (("x_next", "x"), ("x0_hat", "x0_prev"), ("next_step", "step"))


class TrtLoop:
    """`ldlm.sampler.Loop` over the stages `conditioning` and `denoiser_step`.

    The latents that a run returns lie on the device, and the next run overwrites them.

    Args:
        conditioning, step: the stages, of one runtime; no one else may run `step`.

    Attributes:
        inside: seconds that the device has spent in `denoiser_step` and its copies so far.
    """

    def __init__(self, conditioning: TrtStage, step: TrtStage) -> None:
        self._conditioning, self._step = conditioning, step
        self._device, self._stream = step.runtime.device, step.runtime.stream
        self.inside = 0.0
        largest = {axis: allowed.max for axis, allowed in step.ranges.items()}
        size = step.memory("noise", largest).nbytes // 4
        self._slots = [Slot(self._device, size) for _ in range(2)]
        step.then(self._hand_on)

    def __call__(self, table: StepTable) -> Run:
        """Compute the tables of every step, on the device; see `ldlm.sampler.Loop`.

        The run raises StageInputError for a batch or length that no profile holds, and
        EngineRunError where TensorRT or CUDA fails.
        """
        tables = [Tables(self._conditioning, part) for part in parts(table)]
        self._device.synchronize(self._stream)  # so that it is not taken for the first step's time
        return functools.partial(self._run, tables)

    def _run(self, tables: Sequence[Tables], noise: NoiseStream, tick: Tick) -> DeviceArray:
        sizes = self._checked(noise)
        self._begin(noise, sizes)
        turn = 0
        for table in tables:
            for name, source in table.inputs.items():
                self._copy(self._step.memory(name, sizes), source)
            for row in range(table.part.steps):
                slot = self._slots[turn]
                self._settle(slot, tick)
                if table.part.draws(row):
                    self._upload("noise", noise.draw(slot.array(noise.shape)), sizes)
                self._device.record(slot.begin, self._stream)
                self._step.launch(sizes)
                self._device.record(slot.end, self._stream)
                slot.in_use = True
                turn = 1 - turn
        for slot in (self._slots[turn], self._slots[1 - turn]):
            self._settle(slot, tick)
        return self._step.memory("x_next", sizes)

    def _checked(self, noise: NoiseStream) -> Sizes:
        """Batch and length, after the step's own check of its inputs."""
        spec, config = self._step.spec, self._step.config
        found = {
            tensor.name: (
                tensor.dtype,
                noise.shape if BATCH in tensor.axes else tensor.shape(config, {}),
            )
            for tensor in spec.inputs
        }
        check_inputs(spec, config, self._step.ranges, found)
        return {BATCH: noise.shape[0], LENGTH: noise.shape[1]}

    def _begin(self, noise: NoiseStream, sizes: Sizes) -> None:
        """What the first step reads, and noise that is none for steps that add none."""
        # What an interrupted run still reads from the slots is its own loss.
        first, second = (slot.array(noise.shape) for slot in self._slots)
        second.fill(0)
        self._upload("x", noise.draw(first), sizes)
        self._upload("x0_prev", second, sizes)
        self._upload("noise", second, sizes)
        self._device.synchronize(self._stream)
        for slot in self._slots:
            slot.in_use = False

    def _settle(self, slot: Slot, tick: Tick) -> None:
        """Wait for the step that last used a slot, so that its noise may be overwritten."""
        if slot.in_use:
            self._device.wait(slot.end)
            self.inside += self._device.elapsed(slot.begin, slot.end)
            slot.in_use = False
            tick()

    def _hand_on(self, sizes: Sizes) -> None:
        """Make the outputs of a step the inputs of the next; captured with the step."""
        for output, name in HANDED_ON:
            self._copy(self._step.memory(name, sizes), self._step.memory(output, sizes))

    def _upload(self, name: str, array: Array, sizes: Sizes) -> None:
        self._device.upload(self._step.memory(name, sizes).pointer, array, self._stream)

    def _copy(self, target: DeviceArray, source: DeviceArray) -> None:
        self._device.copy(target.pointer, source.pointer, source.nbytes, self._stream)


class Tables:
    """A part of the steps as `denoiser_step` reads it, in device memory of its own.

    Args:
        conditioning: computes the modulations.
        part: of the steps.

    Attributes:
        inputs: modulations [TABLE_STEPS, rows, d], coefficients [TABLE_STEPS, 3], and the number
            of the first row, by the names of the step's inputs.
    """

    def __init__(self, conditioning: TrtStage, part: Part) -> None:
        self.part = part
        self._device, self._stream = conditioning.runtime.device, conditioning.runtime.stream
        made = conditioning.run(part.t)
        modulations = self._allocate(made.shape, made.dtype)
        self._device.copy(modulations.pointer, made.pointer, made.nbytes, self._stream)
        self.inputs = {
            "modulations": modulations,
            "coefficients": self._uploaded(part.coefficients),
            "step": self._uploaded(np.zeros(1, np.int64)),
        }

    def _uploaded(self, array: Array) -> DeviceArray:
        copy = self._allocate(array.shape, array.dtype)
        self._device.upload(copy.pointer, array, self._stream)
        return copy

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Memory that goes when this object goes."""
        array = DeviceArray(self._device, self._stream, 0, shape, dtype.name)
        array.pointer = self._device.allocate(array.nbytes)
        weakref.finalize(self, self._device.free, array.pointer).atexit = False
        return array


class Slot:
    """Noise on its way to a step, and the moments when the step begins and ends.

    Args:
        device: where the step runs.
        size: elements of the largest noise.

    Attributes:
        in_use: whether the device may still read the noise.
    """

    def __init__(self, device: Device, size: int) -> None:
        self._memory = device.pinned(size)
        self.begin, self.end = device.event(), device.event()
        for event in (self.begin, self.end):
            weakref.finalize(self, device.drop, event).atexit = False
        self.in_use = False

    def array(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The noise's memory, [B, T, d]."""
        return self._memory[: int(np.prod(shape))].reshape(shape)
