"""TensorRT at run time: one runtime for TensorRT-RTX and plain TensorRT."""

import logging
import weakref
from typing import Any, Self

from engines.runtime.stage import RuntimeStage
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.device import Cuda
from engines.tensorrt.library import LIBRARIES, load_library, make_logger
from engines.tensorrt.stream import Stream
from ldlm.errors import ArtifactError, EngineRunError

log = logging.getLogger(__name__)


class Scratch:
    """Device memory that all contexts of a runtime share: one stream runs them in order.

    Used in a turn of the stream.

    Attributes:
        generation: counts how often it was replaced by a larger one; a captured graph holds the
            pointer of its own time.
    """

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self.pointer, self.size, self.generation = 0, 0, 0

    def reserve(self, size: int) -> None:
        """Make it at least `size` bytes."""
        if size <= self.size:
            return
        self.release()
        self.pointer, self.size = self._device.allocate(size), size

    def release(self) -> None:
        """Give the memory back."""
        pointer, self.pointer, self.size = self.pointer, 0, 0
        self.generation += 1
        if pointer:
            self._device.free(pointer)


class TrtRuntime:
    """A TensorRT library, one GPU, one stream and the scratch memory that its stages share.

    Threads may share it. A context manager that closes it.

    Args:
        name: of LIBRARIES.
        device: the GPU; None is the first.
        module: the library, if it is loaded already.

    Attributes:
        version: of the library.
        opened: the stages that are in use; closed with it.

    Raises:
        ProviderError: no library, no driver or no GPU.
    """

    def __init__(self, name: str, device: Cuda | None = None, module: Any = None) -> None:
        self.name, self.library = name, LIBRARIES[name]
        self.trt = load_library(name) if module is None else module
        self.version = str(self.trt.__version__)
        self.device = Cuda() if device is None else device
        self.stream = Stream(self.device)
        self.scratch = Scratch(self.device)
        self.opened: weakref.WeakSet[RuntimeStage] = weakref.WeakSet()
        self._messages = make_logger(self.trt, log.warning)
        self._runtime = self.trt.Runtime(self._messages)

    def engine(self, plan: bytes, stage: str) -> Any:
        """An engine in device memory.

        Raises:
            ArtifactError: the library does not take it; with what it said.
            EngineRunError: the runtime is closed.
        """
        if self._runtime is None:
            raise EngineRunError("the TensorRT runtime is closed", stage=stage)
        with self.stream.turn():
            self.reported()
            engine = self._runtime.deserialize_cuda_engine(plan)
            if engine is None:
                raise ArtifactError(
                    f"{self.library.package} {self.version} does not take the engine",
                    stage=stage,
                    got=self.reported(),
                    remedy="ldlm build it again with this version, for this GPU",
                )
            self.scratch.reserve(engine.device_memory_size_v2)
        return engine

    def reported(self) -> str:
        """What the library has reported since it was last asked."""
        text = "; ".join(dict.fromkeys(self._messages.errors))[:1000]
        self._messages.errors.clear()
        return text or "no reason given"

    def settings(self, engine: Any, cache: RuntimeCache | None) -> Any:
        """How the contexts of an engine are made: over the shared scratch memory."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self.library.jit:
            return strategy
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(strategy)
        # We capture graphs ourselves, as with plain TensorRT; a captured graph would keep
        # the generic kernels, so the specialised ones must be there from the first run.
        settings.cuda_graph_strategy = self.trt.CudaGraphStrategy.DISABLED
        kinds = self.trt.DynamicShapesKernelSpecializationStrategy
        settings.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER
        if cache is not None:
            cache.attach(settings)
        return settings

    def close(self) -> None:
        """Close its stages, and give back the scratch memory and the library's runtime."""
        for stage in list(self.opened):
            stage.close()
        with self.stream.turn():
            self.scratch.release()
        self._runtime = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
