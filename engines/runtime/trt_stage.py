"""A stage on a TensorRT engine: buffers on the device, CUDA graphs, profiles chosen by shape."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifacts.manifest import Manifest
from engines.runtime.engine_file import checked_engine
from engines.runtime.trt import TrtRuntime
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.device import DeviceArray, Foreign, foreign
from engines.tensorrt.profiles import fitting
from export.stages import DYNAMIC, AxisRange, StageSpec, check_inputs, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, EngineRunError, StageInputError

log = logging.getLogger(__name__)

Array = NDArray[Any]
Profiles = Mapping[str, Mapping[str, AxisRange]]
Sizes = Mapping[str, int]  # of the dynamic axes
Then = Callable[[Sizes], None]


# Shapes that a stage keeps a context and a graph for; the one used longest ago makes room.
SHAPES = 16


@dataclass
class Shape:
    """An execution context for one pair of sizes: set up once and not changed any more.

    Attributes:
        generation: of the scratch memory that the context uses.
        ran: whether it has run since it was set up, as a capture demands.
        graph: the captured graph, or 0.
    """

    context: Any
    generation: int = -1
    ran: bool = False
    graph: int = 0


class TrtStage:
    """One stage as a callable: NumPy arrays in, in the spec's order, its first output out.

    Memory for inputs and outputs is allocated once, for the largest profile, and belongs to the
    stage. The first run of a shape is plain, the second is captured as a CUDA graph, later ones
    replay it; where capturing fails the log says so, and the stage runs plainly from then on.

    Args:
        runtime: library, device, stream and scratch memory.
        plan: the engine's bytes.
        spec, config: what its inputs must look like.
        profiles: in the engine's order; the first that holds a shape is used. None for a stage
            of one shape.
        cache: of the kernels that TensorRT-RTX compiles on the device.
        graphs: whether to capture CUDA graphs.

    Attributes:
        ranges: the sizes of any profile, per dynamic axis.
        runtime: as given.

    Raises:
        ArtifactError: the library does not take the engine, or it has other tensors or profiles.
    """

    def __init__(
        self,
        runtime: TrtRuntime,
        plan: bytes,
        spec: StageSpec,
        config: LDLMConfig,
        profiles: Profiles,
        *,
        cache: RuntimeCache | None = None,
        graphs: bool = True,
    ) -> None:
        self.spec, self.config, self.profiles = spec, config, profiles
        self.runtime, self._cache, self._capture = runtime, cache, graphs
        self._engine = runtime.engine(plan, spec.name)
        _require_same(self._engine, spec, profiles)
        self._settings = runtime.settings(self._engine, cache)
        self.ranges = _envelope(profiles)
        largest = {axis: allowed.max for axis, allowed in self.ranges.items()}
        self._tensors = {tensor.name: tensor for tensor in (*spec.inputs, *spec.outputs)}
        self._pointers = {
            name: self._device.allocate(_bytes(tensor.shape(config, largest), tensor.dtype))
            for name, tensor in self._tensors.items()
        }
        self._shapes: OrderedDict[tuple[int, ...], Shape] = OrderedDict()
        self._then: Then = lambda _: None

    @classmethod
    def from_artifacts(
        cls,
        runtime: TrtRuntime,
        folder: Path,
        manifest: Manifest,
        stage_name: str,
        precision: str,
        **options: Any,
    ) -> TrtStage:
        """A stage of an artifacts folder, after all that can be checked without TensorRT was.

        Raises:
            ArtifactError: see `engines.runtime.engine_file.checked_engine`.
        """
        entry, plan = checked_engine(
            folder, manifest, precision, stage_name, runtime.name, runtime.device.sm,
            runtime.version,
        )  # fmt: skip
        if runtime.library.jit:
            cache = RuntimeCache.of(entry.engine.sha256, runtime.version, runtime.device)
            options = {"cache": cache, **options}
        return cls(runtime, plan, stage(stage_name), manifest.config, entry.profiles, **options)

    def __call__(self, *inputs: Any) -> Array:
        """Run the stage, and copy its first output to the host.

        Raises:
            StageInputError, EngineRunError: as `run`.
        """
        return self.run(*inputs).numpy()

    def fetch(self, names: Sequence[str], *inputs: Any) -> list[Array]:
        """Run the stage, and copy the named outputs to the host.

        Raises:
            StageInputError, EngineRunError: as `run`.
        """
        sizes = self._take(inputs)
        self.launch(sizes)
        return [self.memory(name, sizes).numpy() for name in names]

    def run(self, *inputs: Any) -> DeviceArray:
        """Enqueue the stage; its first output on the device, which the next run overwrites.

        Args:
            inputs: NumPy arrays, or tensors on the device of any library that speaks DLPack or the
                CUDA array interface; both are copied into the stage's own memory, and may be
                changed as soon as this returns. What another stage of the same runtime returned
                is copied when its turn comes, and nothing waits.

        Raises:
            StageInputError: an input has the wrong dtype or shape, or a size outside the profiles.
            EngineRunError: TensorRT or CUDA reports a failure.
        """
        sizes = self._take(inputs)
        self.launch(sizes)
        return self.memory(self.spec.outputs[0].name, sizes)

    def launch(self, sizes: Sizes) -> None:
        """Enqueue the stage on what its memory holds.

        Raises:
            StageInputError: no profile holds the sizes.
            EngineRunError: as `run`.
        """
        shape = self._shape(sizes)
        if not shape.graph and self._capture and shape.ran:
            self._record(shape, sizes)
        if shape.graph:
            self._device.launch(shape.graph, self._stream)
            return
        self._execute(shape, sizes)
        if not shape.ran:
            shape.ran = True
            if self._cache is not None:
                self._device.synchronize(self._stream)
                self._cache.save()

    def memory(self, name: str, sizes: Sizes) -> DeviceArray:
        """The stage's own memory for an input or an output, as it is at these sizes."""
        tensor = self._tensors[name]
        shape, pointer = tensor.shape(self.config, sizes), self._pointers[name]
        return DeviceArray(self._device, self._stream, pointer, shape, tensor.dtype)

    def then(self, work: Then) -> None:
        """Let every run end in what `work(sizes)` enqueues, which is captured with it."""
        self._then = work
        for shape in self._shapes.values():
            self._forget(shape)

    def close(self) -> None:
        """Give the device memory back; the stage cannot be run any more."""
        for shape in self._shapes.values():
            self._forget(shape)
        self._shapes.clear()
        for pointer in self._pointers.values():
            self._device.free(pointer)
        self._pointers.clear()

    @property
    def _device(self) -> Any:
        return self.runtime.device

    @property
    def _stream(self) -> int:
        return self.runtime.stream

    def _take(self, inputs: Sequence[Any]) -> Sizes:
        """Copy the inputs into the stage's memory; their sizes."""
        seen = [self._look(tensor) for tensor in inputs]
        sizes = self._checked_sizes(seen)
        for tensor, source in zip(self.spec.inputs, seen, strict=True):
            pointer = self._pointers[tensor.name]
            if isinstance(source, np.ndarray):
                self._device.upload(pointer, source, self._stream)
            else:
                self._device.copy(pointer, source.pointer, source.nbytes, self._stream)
        if any(isinstance(source, Foreign) for source in seen):
            # Its owner may reuse the memory on a stream that does not wait for ours.
            self._device.synchronize(self._stream)
        return sizes

    def _look(self, tensor: Any) -> Array | DeviceArray | Foreign:
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor)
        if isinstance(tensor, DeviceArray) and tensor.is_of(self._device, self._stream):
            return tensor
        return foreign(tensor, self._stream, self._device.index)

    def _checked_sizes(self, seen: Sequence[Array | DeviceArray | Foreign]) -> Sizes:
        names = [tensor.name for tensor in self.spec.inputs]
        if len(seen) != len(names):
            raise StageInputError(
                "other inputs than the stage takes",
                stage=self.spec.name,
                expected=names,
                got=f"{len(seen)} of them",
            )
        found = {
            name: (str(source.dtype), tuple(source.shape))
            for name, source in zip(names, seen, strict=True)
        }
        check_inputs(self.spec, self.config, self.ranges, found)
        sizes: dict[str, int] = {}
        for tensor in self.spec.inputs:
            axes = (str(axis) for axis in tensor.axes)
            sizes.update(zip(axes, found[tensor.name][1], strict=True))
        return {axis: sizes[axis] for axis in DYNAMIC if axis in sizes}

    def _shape(self, sizes: Sizes) -> Shape:
        """The context for these sizes, over the present scratch memory."""
        key = tuple(sizes[axis] for axis in DYNAMIC if axis in sizes)
        shape = self._shapes.get(key)
        if shape is None:
            shape = Shape(self._context(sizes))
            while len(self._shapes) >= SHAPES:
                self._forget(self._shapes.popitem(last=False)[1])
            self._shapes[key] = shape
        self._shapes.move_to_end(key)
        scratch = self.runtime.scratch
        if shape.generation != scratch.generation:  # a graph would use memory that is gone
            self._forget(shape)
            shape.context.set_device_memory(scratch.pointer, scratch.size)
            shape.generation, shape.ran = scratch.generation, False
        return shape

    def _context(self, sizes: Sizes) -> Any:
        """A new context with its profile, shapes and addresses set.

        Raises:
            StageInputError: no profile holds the sizes.
        """
        chosen = fitting(self.profiles, sizes)
        if self.profiles and chosen is None:
            raise StageInputError(
                "no profile of the engine holds these sizes",
                stage=self.spec.name,
                expected="; ".join(f"{n}: {_words(r)}" for n, r in self.profiles.items()),
                got=_words(sizes),
                remedy="use another size, or build with another profile",
            )
        context = self._engine.create_execution_context(self._settings)
        self._demand(context is not None, "execution context")
        if chosen is not None:
            index, name = chosen
            done = context.set_optimization_profile_async(index, self._stream)
            self._demand(done, f"profile '{name}'")
        for tensor in self.spec.inputs:
            shape = tensor.shape(self.config, sizes)
            self._demand(context.set_input_shape(tensor.name, shape), f"shape {shape}")
        for name, pointer in self._pointers.items():
            self._demand(context.set_tensor_address(name, pointer), name)
        self._device.synchronize(self._stream)  # a profile may be switched by copies
        return context

    def _record(self, shape: Shape, sizes: Sizes) -> None:
        """Capture a run as a CUDA graph; where that fails the log says so."""
        try:
            if self.runtime.library.jit and not shape.context.is_stream_capturable(self._stream):
                raise EngineRunError("TensorRT says that it cannot be captured")
            with self._device.capture(self._stream) as captured:
                self._execute(shape, sizes)
        except EngineRunError as error:
            self._capture = False
            log.warning(
                "%s: no CUDA graph, every kernel is launched on its own: %s", self.spec.name, error
            )
        else:
            shape.graph = captured.graph

    def _execute(self, shape: Shape, sizes: Sizes) -> None:
        self._demand(shape.context.execute_async_v3(self._stream), "execution")
        self._then(sizes)

    def _forget(self, shape: Shape) -> None:
        if shape.graph:
            self._device.forget(shape.graph)
            shape.graph = 0

    def _demand(self, done: bool, what: str) -> None:
        if not done:
            raise EngineRunError(
                f"TensorRT refuses the {what}", stage=self.spec.name, got=self.runtime.said()
            )


def _envelope(profiles: Profiles) -> dict[str, AxisRange]:
    """The smallest and the largest size of any profile, per axis; nothing without profiles."""
    return {
        axis: AxisRange(
            min(ranges[axis].min for ranges in profiles.values()),
            min(ranges[axis].opt for ranges in profiles.values()),
            max(ranges[axis].max for ranges in profiles.values()),
        )
        for axis in DYNAMIC
        if profiles
    }


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _words(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def _require_same(engine: Any, spec: StageSpec, profiles: Profiles) -> None:
    """The engine is what the manifest says: tensors and profiles."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    expected = [tensor.name for tensor in (*spec.inputs, *spec.outputs)]
    if sorted(names) != sorted(expected):
        raise ArtifactError(
            "the engine has other tensors", stage=spec.name, expected=expected, got=names
        )
    if engine.num_optimization_profiles != max(1, len(profiles)):  # one is there without any
        raise ArtifactError(
            "the engine has other profiles",
            stage=spec.name,
            expected=", ".join(profiles) or "none of our own",
            got=f"{engine.num_optimization_profiles} of them",
        )
