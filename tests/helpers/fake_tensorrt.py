"""A stand-in for the TensorRT API and for a GPU, on the CPU.

Device memory is host memory; an engine computes with ONNX Runtime what its graph says. It is as
strict as the real thing: what was not set before a run makes the run fail. That its classes have
the names and signatures of the real ones is a test of its own.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifacts import folder as folders
from engines.artifacts import manifest as manifests
from engines.runtime.ort import OrtStage
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_stage import TrtStage
from engines.tensorrt.device import Cuda
from export.stages import DYNAMIC, StageSpec, compiled, stage
from ldlm.errors import EngineRunError

Array = NDArray[Any]


def at(pointer: int, shape: tuple[int, ...], dtype: str) -> Array:
    """The array that lies at an address."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * count).from_address(pointer)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)


Work = Callable[[], object]


class FakeDevice(Cuda):
    """`engines.tensorrt.device.Cuda` in host memory, and what was done with it.

    As lazy as a device may be: work is done when someone waits for it, and no sooner, in the order
    in which all threads have enqueued it. Memory is filled with NaN, also when it is freed. What
    another thread enqueues into a capture, or frees there, is an error as on a GPU.
    """

    def __init__(self, sm: str = "sm89") -> None:
        self.index, self.sm, self.name = 0, sm, "a GPU that is not there"
        self.memory: dict[int, Array] = {}
        self.allocated: list[int] = []
        self.pinned_memory: list[Array] = []
        self.queue: deque[Work] = deque()
        self.recording: list[Work] | None = None
        self.graphs: dict[int, list[Work]] = {}
        self.events: dict[int, float | None] = {}
        self._numbers = itertools.count()
        self._working = threading.RLock()  # one thing after the other
        self._capturing: int | None = None  # which thread
        self.launches = self.captures = self.downloads = self.waits = 0
        self.can_capture = True

    def enqueue(self, work: Work) -> None:
        """Behind all other work, or into the graph that is being captured."""
        if self._capturing not in (None, threading.get_ident()):
            raise EngineRunError("a CUDA call failed", got="captured with another thread's work")
        (self.queue if self.recording is None else self.recording).append(work)

    def use(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        block = np.full(size + 256, 0xFF, np.uint8)
        pointer = -(-block.ctypes.data // 256) * 256
        self.memory[pointer] = block
        self.allocated.append(size)
        return pointer

    def free(self, pointer: int) -> None:
        self._work_off()
        self.memory.pop(pointer).fill(0xFF)

    def stream(self) -> int:
        return 7

    def pinned(self, size: int) -> Array:
        self.pinned_memory.append(np.full(size, np.nan, np.float32))
        return self.pinned_memory[-1]

    def upload(self, pointer: int, array: Array, stream: int) -> None:
        pinned = any(np.shares_memory(array, memory) for memory in self.pinned_memory)
        source = array if pinned else array.copy()
        assert source.flags.c_contiguous
        self.enqueue(lambda: ctypes.memmove(pointer, source.ctypes.data, source.nbytes))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.enqueue(lambda: ctypes.memmove(target, source, size))

    def download(self, array: Array, pointer: int, stream: int) -> None:
        self.synchronize(stream)
        self.downloads += 1
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)

    def synchronize(self, stream: int) -> None:
        self.waits += 1
        self._work_off()

    def event(self) -> int:
        number = next(self._numbers)
        self.events[number] = None
        return number

    def record(self, event: int, stream: int) -> None:
        self.events[event] = None
        self.enqueue(lambda: self.events.update({event: time.perf_counter()}))

    def wait(self, event: int) -> None:
        with self._working:
            while self.events[event] is None and self.queue:
                self.queue.popleft()()

    def elapsed(self, first: int, second: int) -> float:
        begin, end = self.events[first], self.events[second]
        if begin is None or end is None:
            raise EngineRunError("a CUDA call failed", got="cudaErrorNotReady")
        return end - begin

    def drop(self, event: int) -> None:
        del self.events[event]

    @contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        captured: list[int] = []
        self.recording, self._capturing = [], threading.get_ident()
        try:
            yield captured
            if not self.can_capture:
                raise EngineRunError("a CUDA call failed", got="cudaErrorStreamCaptureInvalidated")
            self.captures += 1
            captured.append(self.captures)
            self.graphs[self.captures] = self.recording
        finally:
            self.recording = self._capturing = None

    def launch(self, graph: int, stream: int) -> None:
        self.launches += 1
        for work in self.graphs[graph]:
            self.enqueue(work)

    def forget(self, graph: int) -> None:
        del self.graphs[graph]

    def _work_off(self) -> None:
        if self.recording is not None:
            raise EngineRunError("a CUDA call failed", got="cudaErrorStreamCaptureUnsupported")
        with self._working:
            while self.queue:
                self.queue.popleft()()


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def log(self, severity: Severity, msg: str) -> None:
        pass


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class IRuntimeCache:
    MAGIC = b"kernels"

    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(self.MAGIC):
            return False
        self.content = blob
        return True

    def serialize(self) -> bytes:
        return self.content


class IRuntimeConfig:
    cuda_graph_strategy = CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self.kept["strategy"] = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.kept["cache"] = cache
        return True


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, settings: Any) -> None:
        self._engine, self._settings = engine, settings
        config = engine.compute.config
        self._shapes = {
            t.name: t.shape(config, {}) for t in engine.spec.inputs if t.name not in engine.dynamic
        }
        self._addresses: dict[str, int] = {}
        self._memory = 0
        self._flushed = False
        self.profiles: list[int] = []

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = memory if size >= self._engine.device_memory_size_v2 else 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profiles.append(profile_index)
        self._flushed = False
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self._shapes and name not in self._engine.dynamic:
            return self._shapes[name] == shape
        self._shapes[name], self._flushed = shape, False
        return bool(self.profiles)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._engine.names

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        ready = self._memory in self._engine.device.memory
        ready = ready and bool(self.profiles or not self._engine.dynamic)
        # Like the real one: what was set since the last run must be flushed by a plain run.
        ready = ready and (self._flushed or self._engine.device.recording is None)
        self._flushed = True
        spec = self._engine.spec
        if not ready or set(self._shapes) != {tensor.name for tensor in spec.inputs}:
            return False
        if set(self._addresses) != set(self._engine.names):
            return False
        shapes, addresses = dict(self._shapes), dict(self._addresses)

        def work() -> None:
            inputs = [at(addresses[t.name], shapes[t.name], t.dtype) for t in spec.inputs]
            names = [tensor.name for tensor in spec.outputs]
            feeds = {t.name: array for t, array in zip(spec.inputs, inputs, strict=True)}
            found = self._engine.compute.run(feeds, names)
            for output in spec.outputs:
                result = found[output.name]
                at(addresses[output.name], result.shape, output.dtype)[...] = result

        self._engine.device.enqueue(work)
        if isinstance(self._settings, IRuntimeConfig):
            cache = self._settings.kept["cache"]
            cache.content = IRuntimeCache.MAGIC + str(sorted(shapes.items())).encode()
        return True


class ICudaEngine:
    device_memory_size_v2 = 1024

    def __init__(
        self, device: FakeDevice, spec: StageSpec, compute: OrtStage, profiles: int, memory: int
    ) -> None:
        self.device, self.spec, self.compute = device, spec, compute
        self.names = [tensor.name for tensor in (*spec.inputs, *spec.outputs)]
        self.dynamic = {t.name for t in spec.inputs if any(axis in DYNAMIC for axis in t.axes)}
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = max(1, profiles)
        self.device_memory_size_v2 = memory
        self.contexts: list[IExecutionContext] = []

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: Any) -> IExecutionContext:
        self.contexts.append(IExecutionContext(self, runtime_config))
        return self.contexts[-1]


class FakeTensorRT:
    """The module: knows the engines of some artifacts folders by the hash of their bytes."""

    __version__ = "1.7.1.116"
    ILogger = ILogger
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    CudaGraphStrategy = CudaGraphStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy

    def __init__(self, device: FakeDevice, *known_folders: Path) -> None:
        self.device = device
        self.engines: list[ICudaEngine] = []
        known: dict[str, Callable[[], ICudaEngine]] = {}
        for folder in known_folders:
            manifest = folders.load(folder)
            for entry in manifest.engines:
                known[entry.engine.sha256] = self._maker(folder, manifest, entry)
        module = self

        class Runtime:
            def __init__(self, logger: ILogger) -> None:
                self.logger = logger

            def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
                digest = hashlib.sha256(serialized_engine).hexdigest()
                if digest not in known:
                    self.logger.log(ILogger.Severity.ERROR, "magic tag does not match")
                    return None
                module.engines.append(known[digest]())
                return module.engines[-1]

        self.Runtime = Runtime

    def _maker(
        self, folder: Path, manifest: manifests.Manifest, entry: manifests.EngineEntry
    ) -> Callable[[], ICudaEngine]:
        def make() -> ICudaEngine:
            compute = OrtStage.from_artifacts(folder, manifest, entry.stage, entry.precision)
            memory = 1024 * (1 + compiled().index(entry.stage))
            return ICudaEngine(
                self.device, stage(entry.stage), compute, len(entry.profiles), memory
            )

        return make


def runtime_of(*known_folders: Path, sm: str = "sm89") -> TrtRuntime:
    """A runtime on the stand-in that knows these folders' engines."""
    device = FakeDevice(sm)
    return TrtRuntime("rtx", device, FakeTensorRT(device, *known_folders))


def stage_of(runtime: TrtRuntime, folder: Path, name: str) -> TrtStage:
    """A float32 stage of a folder."""
    return TrtStage.from_artifacts(runtime, folder, folders.load(folder), name, "fp32")
