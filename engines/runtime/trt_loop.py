"""The sampler's loop on TensorRT: one captured CUDA graph per step, and the state on the device.

The host draws the noise, a step ahead of the device, and launches; it reads nothing back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Generator

import numpy as np

from engines.runtime.pool import Lease
from engines.runtime.stage import Shaped
from engines.runtime.step_tables import HANDED_ON, Tables, tables
from engines.runtime.trt_stage import Binding, Sizes, TrtStage
from engines.tensorrt.stream import DeviceArray, Stream
from export.stages import BATCH
from ldlm.errors import SamplerError
from ldlm.noise import Float32s, NoiseStream
from ldlm.sampler import LoopStep, Steps
from ldlm.solvers import StepTable


class TrtLoop:
    """`ldlm.sampler.Loop` over the stages `conditioning` and `denoiser_step`.

    A step is told one step after its launch. Of `x` and `x0_hat` only those of the last step of a
    batch can be read, before the generator goes on; the others were overwritten by then, and
    raise SamplerError. Runs of several threads share the engines and the stream alone.

    Args:
        conditioning, step: the stages, of one runtime.
    """

    def __init__(self, conditioning: TrtStage, step: TrtStage) -> None:
        self._conditioning, self._step = conditioning, step
        self._idle = step.pool()

    def __call__(self, table: StepTable) -> Steps:
        """Compute the tables of every step, on the device; see `ldlm.sampler.Loop`.

        The steps raise StageInputError for a batch or length that no profile holds, and
        EngineRunError where TensorRT or CUDA fails.
        """
        return functools.partial(self._steps, tables(table, self._modulations))

    def _modulations(self, t: Float32s) -> DeviceArray:
        """In memory of their own: what `conditioning` runs on serves the next table."""
        stream = self._conditioning.runtime.stream
        made = self._conditioning.enqueue(t)
        with stream.turn():
            kept = stream.allocate(made.shape, made.dtype.name)
            kept.fill(made)
        return kept

    def _steps(self, steps: list[Tables], noise: NoiseStream) -> Generator[LoopStep, None, None]:
        sizes = self._checked(noise)
        lease = self._idle.take(noise.shape, lambda: State(self._step, sizes))
        with lease as state:
            held = weakref.ref(lease)
            try:
                state.begin(noise)
                for table in steps:
                    state.read(table)
                    for row in range(table.steps):
                        if (seconds := state.free_slot()) is not None:
                            yield _told(held, state.launches - 1, seconds)
                        state.step(noise if table.needs_noise(row) else None)
                for behind in (1, 0):
                    if (seconds := state.free_slot(behind)) is not None:
                        yield _told(held, state.launches - behind, seconds)
            finally:
                for slot in state.slots:
                    slot.free()

    def _checked(self, noise: NoiseStream) -> Sizes:
        """Batch and length, after the step's own check of its inputs."""
        spec, config = self._step.spec, self._step.config
        found = {
            t.name: Shaped(t.dtype, noise.shape if BATCH in t.axes else t.shape(config, {}))
            for t in spec.inputs
        }
        return self._step.check(found)


def _told(held: weakref.ref[Lease[State]], number: int, seconds: float) -> LoopStep:
    """A step that is done, while its run may hold the state or not."""

    def read(name: str) -> DeviceArray:
        lease = held()
        if lease is None or lease.thing.launches != number:
            raise SamplerError(
                "the state of a step that is over is not kept on a device",
                tensor=name,
                expected="the last step of a batch, before the run goes on",
                remedy="--runtime ort or torch keeps every step's",
            )
        return lease.thing.output(name, lease)

    return LoopStep(seconds, lambda: read("x_next"), lambda: read("x0_hat").numpy())


class State(Binding):
    """A batch on its way: a binding of `denoiser_step` whose graph hands its outputs on.

    Attributes:
        slots: for the noise of two steps.
        launches: steps since it began.
    """

    def __init__(self, stage: TrtStage, sizes: Sizes) -> None:
        super().__init__(stage, sizes)
        self.launches = 0
        self.slots = [Slot(self._stream, self.memory["noise"].shape) for _ in range(2)]

    def begin(self, noise: NoiseStream) -> None:
        """What the first step reads, and noise that is none for steps that add none."""
        self.launches = 0
        first, second = self.slots
        noise.draw(first.noise)
        second.noise.fill(0)
        with self._stream.turn():
            for name, slot in (("x", first), ("x0_prev", second), ("noise", second)):
                self.memory[name].fill(slot.noise)
            for slot in self.slots:
                self._device.record(slot.end, self._stream.handle)
                slot.in_use = True

    def read(self, tables: Tables) -> None:
        """Let the next steps read these tables, from their first row."""
        with self._stream.turn():
            self.take(tables.inputs)

    def free_slot(self, behind: int = 1) -> float | None:
        """Wait until the slot of a step before may be overwritten; the step's seconds.

        None where no step has used it.
        """
        return self.slots[(self.launches + 1 + behind) % 2].free()

    def step(self, noise: NoiseStream | None) -> None:
        """Enqueue the next step, with noise of its own or without any."""
        slot = self.slots[self.launches % 2]
        if noise is not None:
            noise.draw(slot.noise)
        handle = self._stream.handle
        with self._stream.turn():
            if noise is not None:
                self.memory["noise"].fill(slot.noise)
            self._device.record(slot.begin, handle)
            self.launch()
            self._device.record(slot.end, handle)
            slot.in_use = slot.ran = True
        self.launches += 1

    def execute(self) -> None:
        """A step, and its outputs as the inputs of the next; captured together."""
        super().execute()
        for output, name in HANDED_ON.items():
            self.memory[name].fill(self.memory[output])


class Slot:
    """Noise on its way to a step, and the moments when the step begins and ends.

    Args:
        stream: that runs the step.
        shape: of the noise, [B, T, d].

    Attributes:
        noise: page-locked memory for it.
        in_use: whether the device may still read the noise.
        ran: whether a step is what uses it.
    """

    def __init__(self, stream: Stream, shape: tuple[int, ...]) -> None:
        self._device = stream.device
        with stream.turn():
            self.noise = self._device.pinned(int(np.prod(shape))).reshape(shape)
            self.begin, self.end = self._device.event(), self._device.event()
        for event in (self.begin, self.end):
            stream.when_gone(self, self._device.drop, event)
        # Page-locked memory, too, is given back when nobody enqueues.
        stream.when_gone(self, [self.noise].clear)
        self.in_use = self.ran = False

    def free(self) -> float | None:
        """Wait until the noise may be overwritten; seconds of the step that read it, if one did."""
        if not self.in_use:
            return None
        self._device.wait(self.end)
        self.in_use, ran, self.ran = False, self.ran, False
        return self._device.elapsed(self.begin, self.end) if ran else None
