"""A stage on a TensorRT engine: buffers on the device, CUDA graphs, profiles chosen by shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.compile.targets import fitting
from engines.manifest import EngineEntry, Manifest
from engines.runtime.cuda import DeviceArray, Foreign, foreign
from engines.runtime.engine_file import checked_engine
from engines.runtime.trt import RuntimeCache, TrtRuntime
from export.stages import DYNAMIC, AxisRange, StageSpec, check_inputs, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, EngineRunError, StageInputError

log = logging.getLogger(__name__)

Array = NDArray[Any]
Profiles = Mapping[str, Mapping[str, AxisRange]]


class TrtStage:
    """One stage as a callable: NumPy arrays in, in the spec's order, its one output out.

    Memory for inputs and outputs is allocated once, for the largest profile, and belongs to the
    stage. The first run of a shape is plain, the second is captured as a CUDA graph, later ones
    replay it; where capturing fails the log says so, once per shape.

    Args:
        runtime: library, device, stream and scratch memory.
        plan: the engine's bytes.
        spec, config: what its inputs must look like.
        profiles: in the engine's order; the first that holds a shape is used.
        cache: of the kernels that TensorRT-RTX compiles on the device.
        graphs: whether to capture CUDA graphs.

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
        self._runtime, self._cache, self._capture = runtime, cache, graphs
        self._engine = runtime.engine(plan, spec.name)
        _require_same(self._engine, spec, profiles)
        self._context = runtime.context(self._engine, cache)
        self._ranges = _envelope(profiles)
        largest = {axis: allowed.max for axis, allowed in self._ranges.items()}
        self._arrays = {
            tensor.name: self._allocate(tensor.shape(config, largest), tensor.dtype)
            for tensor in (*spec.inputs, *spec.outputs)
        }
        self._profile, self._generation = -1, 0
        self._sizes: tuple[int, ...] = ()
        self._graphs: dict[tuple[int, ...], int] = {}
        self._ran: set[tuple[int, ...]] = set()

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
        entry: EngineEntry
        entry, plan = checked_engine(
            folder, manifest, precision, stage_name, runtime.name, runtime.device.sm,
            runtime.version,
        )  # fmt: skip
        if runtime.library.jit:
            cache = RuntimeCache.of(entry.engine.sha256, runtime.version, runtime.device)
            options = {"cache": cache, **options}
        return cls(runtime, plan, stage(stage_name), manifest.config, entry.profiles, **options)

    def __call__(self, *inputs: Array) -> Array:
        """Run the stage, and copy its output to the host.

        Raises:
            StageInputError, EngineRunError: as `run`.
        """
        return self.run(*inputs).numpy()

    def run(self, *inputs: Any) -> DeviceArray:
        """Enqueue the stage; its output on the device, which the next run overwrites.

        Args:
            inputs: NumPy arrays, or tensors on the device of any library that speaks DLPack or the
                CUDA array interface; both are copied into the stage's own memory.

        Raises:
            StageInputError: an input has the wrong dtype or shape, or a size outside the profiles.
            EngineRunError: TensorRT or CUDA reports a failure.
        """
        seen = [self._look(tensor) for tensor in inputs]
        sizes = self._checked_sizes(seen)
        self._prepare(sizes)
        for tensor, source in zip(self.spec.inputs, seen, strict=True):
            array = self._arrays[tensor.name]
            if isinstance(source, Foreign):
                self._device.copy(array.pointer, source.pointer, source.nbytes, self._stream)
            else:
                self._device.upload(array.pointer, source, self._stream)
        self._enqueue()
        return self._arrays[self.spec.outputs[0].name]

    @property
    def _device(self) -> Any:
        return self._runtime.device

    @property
    def _stream(self) -> int:
        return self._runtime.stream

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        array = DeviceArray(self._device, self._stream, 0, shape, dtype)
        array.pointer = self._device.allocate(array.nbytes)
        return array

    def _look(self, tensor: Any) -> Array | Foreign:
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor)
        return foreign(tensor, self._stream)

    def _checked_sizes(self, seen: list[Array | Foreign]) -> dict[str, int]:
        names = [tensor.name for tensor in self.spec.inputs]
        found = {
            name: (str(source.dtype), tuple(source.shape))
            for name, source in zip(names, seen, strict=False)
        }
        if len(seen) != len(names):
            found = {}
        check_inputs(self.spec, self.config, self._ranges, found)
        sizes: dict[str, int] = {}
        for tensor in self.spec.inputs:
            sizes.update(zip(tensor.axes, found[tensor.name][1], strict=True))
        return {axis: sizes[axis] for axis in DYNAMIC}

    def _prepare(self, sizes: dict[str, int]) -> None:
        """Choose the profile, set the shapes and the scratch memory, where they have changed."""
        scratch = self._runtime.scratch
        if scratch.generation != self._generation:
            self._context.set_device_memory(scratch.pointer, scratch.size)
            self._generation = scratch.generation
            self._forget_graphs()
        if tuple(sizes.values()) == self._sizes:
            return
        chosen = fitting(self.profiles, sizes)
        if chosen is None:
            raise StageInputError(
                "no profile of the engine holds these sizes",
                stage=self.spec.name,
                expected="; ".join(f"{n}: {_words(r)}" for n, r in self.profiles.items()),
                got=_words(sizes),
                remedy="use another size, or build with another profile",
            )
        index, _ = chosen
        if index != self._profile:
            self._demand(
                self._context.set_optimization_profile_async(index, self._stream), "profile"
            )
            self._profile = index
        for tensor in (*self.spec.inputs, *self.spec.outputs):
            array = self._arrays[tensor.name]
            array.shape = tensor.shape(self.config, sizes)
            if tensor in self.spec.inputs:
                self._demand(self._context.set_input_shape(tensor.name, array.shape), tensor.name)
            self._demand(self._context.set_tensor_address(tensor.name, array.pointer), tensor.name)
        self._sizes = tuple(sizes.values())

    def _enqueue(self) -> None:
        sizes = self._sizes
        if sizes in self._graphs:
            self._device.launch(self._graphs[sizes], self._stream)
            return
        if self._capture and sizes in self._ran and self._captured():
            self._device.launch(self._graphs[sizes], self._stream)
            return
        self._execute()
        if sizes not in self._ran:
            self._ran.add(sizes)
            if self._cache is not None:
                self._device.synchronize(self._stream)
                self._cache.save()

    def _captured(self) -> bool:
        """Record a run as a CUDA graph; False, and a word in the log, where that fails."""
        try:
            with self._device.capture(self._stream) as captured:
                self._execute()
        except EngineRunError as error:
            log.warning(
                "%s: no CUDA graph at %s, every kernel is launched on its own: %s",
                self.spec.name, self._sizes, error,
            )  # fmt: skip
            self._capture = False
            return False
        self._graphs[self._sizes] = captured.graph
        return True

    def _execute(self) -> None:
        self._demand(self._context.execute_async_v3(self._stream), "execution")

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            self._device.forget(graph)
        self._graphs.clear()

    def _demand(self, done: bool, what: str) -> None:
        if not done:
            raise EngineRunError(
                f"TensorRT refuses the {what}",
                stage=self.spec.name,
                got=f"sizes {self._sizes or 'not set'}",
            )


def _envelope(profiles: Profiles) -> dict[str, AxisRange]:
    """The smallest and the largest size of any profile, per axis."""
    return {
        axis: AxisRange(
            min(ranges[axis].min for ranges in profiles.values()),
            min(ranges[axis].opt for ranges in profiles.values()),
            max(ranges[axis].max for ranges in profiles.values()),
        )
        for axis in DYNAMIC
    }


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
    if engine.num_optimization_profiles != len(profiles):
        raise ArtifactError(
            "the engine has other profiles",
            stage=spec.name,
            expected=", ".join(profiles),
            got=f"{engine.num_optimization_profiles} of them",
        )
