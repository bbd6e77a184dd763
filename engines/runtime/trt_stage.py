"""A stage on a TensorRT engine: every run has buffers, a context and a CUDA graph of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.artifacts.manifest import EngineEntry, Manifest, read
from engines.runtime.pool import Lease, Pool
from engines.runtime.stage import Array, RuntimeStage, named
from engines.runtime.trt import TrtRuntime
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.device import Cuda
from engines.tensorrt.profiles import Profiles, fitting
from engines.tensorrt.stream import DeviceArray, Foreign, foreign
from engines.tensorrt.targets import NO_RTX, target_of
from export.stages import DYNAMIC, AxisRange, StageSpec, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, EngineRunError, StageInputError

log = logging.getLogger(__name__)

Sizes = Mapping[str, int]  # of the dynamic axes
Feed = Array | DeviceArray


class TrtStage(RuntimeStage):
    """One stage in TensorRT: NumPy arrays or tensors on the device in, in the spec's order.

    Args:
        runtime: library, device, stream and scratch memory.
        plan: the engine's bytes.
        spec, config: what its inputs must look like.
        profiles: in the engine's order; the first that holds a shape is used. None for a stage
            of one shape.
        cache: of the kernels that TensorRT-RTX compiles on the device.

    Attributes:
        ranges: the sizes of any profile, per dynamic axis.
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
        *,
        cache: RuntimeCache | None = None,
    ) -> None:
        super().__init__(spec, config, "cuda", _envelope(profiles))
        self.runtime, self.captures = runtime, True
        self._profiles, self._cache = profiles, cache
        engine = runtime.engine(plan, spec.name)
        _require_same(engine, spec, profiles)
        # The engine and how its contexts are made; nothing once it is closed.
        self._loaded = [engine, runtime.settings(engine, cache)]
        self._pools: list[Pool[Any, Any]] = []
        self._idle = self.pool()
        # It leaves the device when nobody enqueues, not where a garbage collector finds it.
        runtime.stream.when_gone(self, self._loaded.clear)
        runtime.opened.add(self)

    @classmethod
    def from_artifacts(
        cls, runtime: TrtRuntime, folder: Path, manifest: Manifest, stage_name: str, precision: str
    ) -> TrtStage:
        """A stage of an artifacts folder, after the checks of `checked_engine`."""
        entry, plan = checked_engine(runtime, folder, manifest, stage_name, precision)
        cache = None
        if runtime.library.jit:
            cache = RuntimeCache(entry.engine.sha256, runtime.version, runtime.device)
        return cls(runtime, plan, stage(stage_name), manifest.config, entry.profiles, cache=cache)

    def enqueue(self, *inputs: Any) -> DeviceArray:
        """Start a run, and wait for nothing: its first output on the device.

        Args:
            inputs: NumPy arrays, or tensors on the device of any library that speaks DLPack or the
                CUDA array interface. All are copied, and may be changed as soon as this returns;
                for one of another library that means to wait until it is read.

        Returns:
            An array that is valid as long as it is held.

        Raises:
            StageInputError: an input is no array, has the wrong dtype or shape, or a size outside
                the profiles.
            EngineRunError: a tensor that cannot be read; or TensorRT or CUDA reports a failure.
        """
        lease = self._launched(self.checked(named(self.spec, inputs)))
        return lease.thing.output(self.spec.outputs[0].name, lease)

    def close(self) -> None:
        """Wait for the stream, then drop bindings (graph, context, buffers), settings and engine.

        A binding that a run still holds goes when the run lets go of it, so what `enqueue` has
        returned stays valid.
        """
        self.runtime.stream.wait()
        for pool in self._pools:
            pool.close()
        with self.runtime.stream.turn():
            self._loaded.clear()

    def pool(self) -> Pool[Any, Any]:
        """A pool of bindings, closed with the stage."""
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
                f"TensorRT refuses the {what}", stage=self.spec.name, got=self.runtime.reported()
            )

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        lease = self._launched(feeds)
        return {name: lease.thing.output(name, lease).numpy() for name in outputs}

    def _launched(self, feeds: Mapping[str, Any]) -> Lease[Binding]:
        """A binding that was given these inputs, and started."""
        sizes = {
            str(axis): size
            for tensor in self.spec.inputs
            for axis, size in zip(tensor.axes, feeds[tensor.name].shape, strict=True)
            if axis in DYNAMIC
        }
        lease = self._idle.take(tuple(sizes.items()), lambda: Binding(self, sizes))
        with lease as binding, self.runtime.stream.turn():
            binding.take(feeds)
            binding.launch()
        return lease

    def _readable(self, name: str, value: Any) -> Feed:
        stream = self.runtime.stream
        if isinstance(value, np.ndarray):
            return np.ascontiguousarray(value)
        if isinstance(value, DeviceArray) and value.stream is stream:
            return value  # its work comes in order
        return foreign(value, stream)


class Binding:
    """One run's own: buffers of these sizes, a context bound to them, and its captured graph.

    The first run is plain, the second is captured as a CUDA graph, later ones replay it; where
    capturing fails the log says so, and the engine runs plainly from then on.

    Args:
        stage: whose.
        sizes: of the dynamic axes; see `TrtStage.context`.

    Attributes:
        stage: as given.
        memory: the buffers by the names of the engine's inputs and outputs.
    """

    def __init__(self, stage: TrtStage, sizes: Sizes) -> None:
        self.stage = stage
        self._device, self._stream = stage.runtime.device, stage.runtime.stream
        self._ran, self._generation = False, -1
        self._graph: list[int] = []  # one, or none
        with self._stream.turn():
            self._context = stage.context(sizes)
            self.memory = {
                tensor.name: self._stream.allocate(tensor.shape(stage.config, sizes), tensor.dtype)
                for tensor in (*stage.spec.inputs, *stage.spec.outputs)
            }
            for name, array in self.memory.items():
                stage.demand(self._context.set_tensor_address(name, array.pointer), name)
            # A profile may be switched by copies.
            self._device.synchronize(self._stream.handle)
        self._stream.when_gone(self, [self._context, *self.memory.values()].clear)
        self._stream.when_gone(self, _forget, self._device, self._graph)

    def take(self, feeds: Mapping[str, Feed]) -> None:
        """Copy inputs into the buffers; in a turn."""
        for name, source in feeds.items():
            self.memory[name].fill(source)
        if any(isinstance(source, Foreign) for source in feeds.values()):
            # Its owner may reuse the memory on a stream that does not wait for ours.
            self._device.synchronize(self._stream.handle)

    def launch(self) -> None:
        """Enqueue a run on what the buffers hold; in a turn.

        Raises:
            EngineRunError: TensorRT or CUDA reports a failure.
        """
        scratch = self.stage.runtime.scratch
        if self._generation != scratch.generation:  # a graph would use memory that is gone
            _forget(self._device, self._graph)
            self._context.set_device_memory(scratch.pointer, scratch.size)
            self._generation, self._ran = scratch.generation, False
        if not self._graph and self._ran and self.stage.captures:
            self._record()
        if self._graph:
            self._device.launch(self._graph[0], self._stream.handle)
            return
        self.execute()
        if not self._ran:
            self._ran = True
            self.stage.keep_kernels()

    def execute(self) -> None:
        """What a graph records: the engine's run, and in a derived class what follows it."""
        self.stage.demand(self._context.execute_async_v3(self._stream.handle), "execution")

    def output(self, name: str, lease: Lease[Any]) -> DeviceArray:
        """A buffer, for whoever needs it longer than the run that holds this binding's lease."""
        array = self.memory[name]
        return DeviceArray(self._stream, array.pointer, array.shape, array.dtype.name, lease)

    def _record(self) -> None:
        """Capture a run as a CUDA graph; where that fails the log says so."""
        handle = self._stream.handle
        try:
            if self.stage.runtime.library.jit and not self._context.is_stream_capturable(handle):
                raise EngineRunError("TensorRT says that it cannot be captured")
            with self._device.capture(handle) as captured:
                self.execute()
        except EngineRunError as error:
            self.stage.captures = False
            name = self.stage.spec.name
            log.warning("%s: no CUDA graph, every kernel is launched on its own: %s", name, error)
        else:
            self._graph += captured


def _forget(device: Cuda, graphs: list[int]) -> None:
    while graphs:
        device.forget(graphs.pop())


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


def _envelope(profiles: Profiles) -> dict[str, AxisRange]:
    """The smallest and the largest size of any profile, per axis; nothing without profiles."""
    found = {a: [ranges[a] for ranges in profiles.values()] for a in DYNAMIC if profiles}
    return {
        a: AxisRange(min(r.min for r in held), min(r.opt for r in held), max(r.max for r in held))
        for a, held in found.items()
    }


def checked_engine(
    runtime: TrtRuntime, folder: Path, manifest: Manifest, stage: str, precision: str
) -> tuple[EngineEntry, bytes]:
    """The entry and the bytes of an engine that the runtime's GPU and library can run.

    All is checked that can be without asking TensorRT: its own answer to an engine of another GPU
    or version is an opaque one, and two engines of one architecture with other weights look the
    same to it.

    Raises:
        ArtifactError: it was not built, or built for other GPUs, by another version, or from
            another graph; or the file is missing, cut or changed.
    """
    sm, version = runtime.device.sm, runtime.version
    target = target_of(runtime.name, sm)
    build = f"ldlm build {folder} --precision {precision} --target {runtime.name}"
    entry = manifest.engine(precision, stage, target)
    if entry is None:
        built = sorted({f"{e.precision} {e.target}" for e in manifest.engines if e.stage == stage})
        raise ArtifactError(
            "this engine was not built",
            stage=stage,
            expected=f"{precision} {target}",
            got=", ".join(built) or "no engine of this stage",
            remedy=build,
        )
    if sm not in entry.sms:
        raise ArtifactError(
            "the engine was built for other GPUs",
            stage=stage,
            expected=" ".join(entry.sms),
            got=f"{sm}: {entry.refused[sm]}" if sm in entry.refused else sm,
            remedy=_other_gpu(folder, entry, sm),
        )
    built_by = entry.builder.get("version", "unknown")
    # Engines of one minor version may not load in another.
    if built_by.split(".")[:2] != version.split(".")[:2]:
        raise ArtifactError(
            "the engine was built by another version of TensorRT",
            stage=stage,
            expected=f"{entry.builder.get('library')} {built_by}",
            got=version,
            remedy="install that version, or ldlm build with this one",
        )
    if not entry.is_of(manifest.graph(precision, stage)):
        problem = "the engine was made from another graph than the one beside it"
        raise ArtifactError(problem, stage=stage, remedy=build)
    return entry, read(entry.engine, folder)


def _other_gpu(folder: Path, entry: EngineEntry, sm: str) -> str:
    """What helps on a GPU that an engine was not built for, without losing the others."""
    if sm in NO_RTX:
        return f"{NO_RTX[sm]}: --target trt"
    if sm in entry.refused:
        return "--runtime ort, or plain TensorRT: --target trt"
    sms = ",".join((*entry.sms, sm))
    return f"ldlm build {folder} --precision {entry.precision} --sm {sms}, with its --profile"
