"""What a run of an engine has to itself: buffers on the device, a context and a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.runtime.pool import Lease, Pool
from engines.runtime.trt import TrtRuntime
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.profiles import Profiles, fitting
from engines.tensorrt.stream import DeviceArray, Foreign
from export.stages import StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, EngineRunError, StageInputError

log = logging.getLogger(__name__)

Sizes = Mapping[str, int]  # of the dynamic axes


class LoadedEngine:
    """An engine in device memory, from which threads make bindings.

    Args:
        runtime: library, device, stream and scratch memory.
        plan: the engine's bytes.
        spec, config: what its tensors look like.
        profiles: in the engine's order; the first that holds a shape is used.
        cache: of the kernels that TensorRT-RTX compiles on the device.

    Attributes:
        captures: whether CUDA graphs are captured; not any more where one could not be.

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
        cache: RuntimeCache | None,
    ) -> None:
        self.runtime, self.spec, self.config = runtime, spec, config
        self.captures = True
        self._profiles, self._cache = profiles, cache
        engine = runtime.engine(plan, spec.name)
        _require_same(engine, spec, profiles)
        # The engine and how its contexts are made; nothing once it is closed.
        self._loaded = [engine, runtime.settings(engine, cache)]
        self._pools: list[Pool[Any, Any]] = []
        # It leaves the device when nobody enqueues, not where a garbage collector finds it.
        runtime.stream.when_gone(self, self._loaded.clear)
        runtime.opened.add(self)

    def pool(self) -> Pool[Any, Any]:
        """A pool of bindings, closed with the engine."""
        self._pools.append(Pool())
        return self._pools[-1]

    def context(self, sizes: Sizes) -> Any:
        """A new context with its profile and shapes set; in a turn of the stream.

        Raises:
            StageInputError: no profile holds the sizes.
            EngineRunError: it is closed, or TensorRT refuses something.
        """
        if not self._loaded:
            raise EngineRunError("the stage is closed", stage=self.spec.name)
        chosen = fitting(self._profiles, sizes)
        if self._profiles and chosen is None:
            raise StageInputError(
                "no profile of the engine holds these sizes",
                stage=self.spec.name,
                expected="; ".join(f"{n}: {_words(r)}" for n, r in self._profiles.items()),
                got=_words(sizes),
                remedy="use another size, or build with another profile",
            )
        engine, settings = self._loaded
        context = engine.create_execution_context(settings)
        self.demand(context is not None, "execution context")
        if chosen is not None:
            index, name = chosen
            done = context.set_optimization_profile_async(index, self.runtime.stream.handle)
            self.demand(done, f"profile '{name}'")
        for tensor in self.spec.inputs:
            shape = tensor.shape(self.config, sizes)
            self.demand(context.set_input_shape(tensor.name, shape), f"shape {shape}")
        return context

    def keep_kernels(self) -> None:
        """Write what TensorRT-RTX has compiled, once the stream has done its work; in a turn."""
        if self._cache is not None:
            self.runtime.device.synchronize(self.runtime.stream.handle)
            self._cache.save()

    def demand(self, done: bool, what: str) -> None:
        """Raise EngineRunError unless TensorRT has done it."""
        if not done:
            raise EngineRunError(
                f"TensorRT refuses the {what}", stage=self.spec.name, got=self.runtime.said()
            )

    def close(self) -> None:
        """Wait for the stream, then drop bindings (graph, context, buffers), settings and engine.

        A binding that a run still holds goes when the run lets go of it.
        """
        self.runtime.stream.wait()
        for pool in self._pools:
            pool.close()
        with self.runtime.stream.turn():
            while self._loaded:
                self._loaded.pop()


class Binding:
    """One run's own: buffers of these sizes, a context bound to them, and its captured graph.

    The first run is plain, the second is captured as a CUDA graph, later ones replay it; where
    capturing fails the log says so, and the engine runs plainly from then on.

    Args:
        engine: whose.
        sizes: of the dynamic axes.

    Attributes:
        engine, sizes: as given.
        memory: the buffers by the names of the engine's inputs and outputs.

    Raises:
        StageInputError, EngineRunError: see `LoadedEngine.context`.
    """

    def __init__(self, engine: LoadedEngine, sizes: Sizes) -> None:
        self.engine, self.sizes = engine, dict(sizes)
        runtime, spec = engine.runtime, engine.spec
        self._device, self._stream = runtime.device, runtime.stream
        self._ran, self._generation = False, -1
        self._graph: list[int] = []  # one, or none
        with self._stream.turn():
            self._context = engine.context(sizes)
            self.memory = {
                tensor.name: self._stream.allocate(tensor.shape(engine.config, sizes), tensor.dtype)
                for tensor in (*spec.inputs, *spec.outputs)
            }
            for name, array in self.memory.items():
                engine.demand(self._context.set_tensor_address(name, array.pointer), name)
            # A profile may be switched by copies.
            self._device.synchronize(self._stream.handle)
        self._stream.when_gone(self, [self._context, *self.memory.values()].clear)
        self._stream.when_gone(self, _forget, self._device, self._graph)

    def take(self, feeds: Mapping[str, np.ndarray[Any, Any] | DeviceArray | Foreign]) -> None:
        """Copy inputs into the buffers; in a turn."""
        for name, source in feeds.items():
            pointer = self.memory[name].pointer
            if isinstance(source, np.ndarray):
                self._device.upload(pointer, source, self._stream.handle)
            else:
                self._device.copy(pointer, source.pointer, source.nbytes, self._stream.handle)
        if any(isinstance(source, Foreign) for source in feeds.values()):
            # Its owner may reuse the memory on a stream that does not wait for ours.
            self._device.synchronize(self._stream.handle)

    def launch(self) -> None:
        """Enqueue a run on what the buffers hold; in a turn.

        Raises:
            EngineRunError: TensorRT or CUDA reports a failure.
        """
        scratch = self.engine.runtime.scratch
        if self._generation != scratch.generation:  # a graph would use memory that is gone
            _forget(self._device, self._graph)
            self._context.set_device_memory(scratch.pointer, scratch.size)
            self._generation, self._ran = scratch.generation, False
        if not self._graph and self._ran and self.engine.captures:
            self._record()
        if self._graph:
            self._device.launch(self._graph[0], self._stream.handle)
            return
        self.execute()
        if not self._ran:
            self._ran = True
            self.engine.keep_kernels()

    def execute(self) -> None:
        """What a graph records: the engine's run, and in a derived class what follows it."""
        self.engine.demand(self._context.execute_async_v3(self._stream.handle), "execution")

    def output(self, name: str, lease: Lease[Any]) -> DeviceArray:
        """A buffer, for whoever needs it longer than the run that holds this binding's lease."""
        array = self.memory[name]
        return DeviceArray(self._stream, array.pointer, array.shape, array.dtype.name, lease)

    def _record(self) -> None:
        """Capture a run as a CUDA graph; where that fails the log says so."""
        handle = self._stream.handle
        try:
            if self.engine.runtime.library.jit and not self._context.is_stream_capturable(handle):
                raise EngineRunError("TensorRT says that it cannot be captured")
            with self._device.capture(handle) as captured:
                self.execute()
        except EngineRunError as error:
            self.engine.captures = False
            name = self.engine.spec.name
            log.warning("%s: no CUDA graph, every kernel is launched on its own: %s", name, error)
        else:
            self._graph.append(captured.graph)


def _forget(device: Any, graphs: list[int]) -> None:
    while graphs:
        device.forget(graphs.pop())


def _words(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def _require_same(engine: Any, spec: StageSpec, profiles: Profiles) -> None:
    """The engine is what the manifest says: tensors and profiles."""
    names: Sequence[str] = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
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
