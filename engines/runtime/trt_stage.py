"""A stage on a TensorRT engine: every run has buffers, a context and a CUDA graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifacts.manifest import Manifest
from engines.runtime.engine_file import checked_engine
from engines.runtime.pool import Lease
from engines.runtime.stage import RuntimeStage, check_inputs, named, signature
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_binding import Binding, LoadedEngine
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.profiles import Profiles
from engines.tensorrt.stream import DeviceArray, Foreign, foreign
from export.stages import DYNAMIC, AxisRange, StageSpec, stage
from ldlm.config import LDLMConfig

Array = NDArray[Any]


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
        engine: what bindings are made of.

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
        super().__init__(spec, config, _envelope(profiles), "cuda")
        self.engine = LoadedEngine(runtime, plan, spec, config, profiles, cache)
        self._idle = self.engine.pool()

    @classmethod
    def from_artifacts(
        cls,
        runtime: TrtRuntime,
        folder: Path,
        manifest: Manifest,
        stage_name: str,
        precision: str,
    ) -> TrtStage:
        """A stage of an artifacts folder, after all that can be checked without TensorRT was.

        Raises:
            ArtifactError: see `engines.runtime.engine_file.checked_engine`.
        """
        entry, plan = checked_engine(
            folder, manifest, precision, stage_name, runtime.name, runtime.device.sm,
            runtime.version,
        )  # fmt: skip
        spec, cache = stage(stage_name), None
        if runtime.library.jit:
            cache = RuntimeCache.of(entry.engine.sha256, runtime.version, runtime.device)
        return cls(runtime, plan, spec, manifest.config, entry.profiles, cache=cache)

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
        lease = self._launched(self._checked(named(self.spec, inputs)))
        return lease.thing.output(self.spec.outputs[0].name, lease)

    def close(self) -> None:
        """Give the device memory back; what `enqueue` has returned stays valid."""
        self.engine.close()

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
        lease = self._idle.take(tuple(sizes.items()), lambda: Binding(self.engine, sizes))
        with lease as binding, self.engine.runtime.stream.turn():
            binding.take(feeds)
            binding.launch()
        return lease

    def _checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        seen = {name: self._look(tensor) for name, tensor in feeds.items()}
        found = {
            name: signature(self.spec, name, tensor)
            if isinstance(tensor, np.ndarray)
            else (str(tensor.dtype), tuple(tensor.shape))
            for name, tensor in seen.items()
        }
        check_inputs(self.spec, self.config, self.ranges, found)
        return seen

    def _look(self, tensor: Any) -> Array | DeviceArray | Foreign:
        stream = self.engine.runtime.stream
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor)
        if isinstance(tensor, DeviceArray) and tensor.stream is stream:
            return tensor  # its work comes in order
        return foreign(tensor, stream)


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
