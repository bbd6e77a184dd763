"""The few CUDA calls that the TensorRT runtime makes, with errors as exceptions. No torch."""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import EngineRunError, ProviderError, installs
from ldlm.noise import Float32s

Array = NDArray[Any]


class Cuda:
    """A GPU, by CUDA's runtime; pointers and handles are plain integers.

    Args:
        index: which of the machine's GPUs.

    Attributes:
        sm: its compute capability, such as "sm89".
        name: as the driver has it.

    Raises:
        ProviderError: no CUDA bindings, no driver, or no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            problem = "TensorRT needs CUDA's Python bindings"
            raise ProviderError(problem, got=str(error), remedy=installs("rtx")) from error
        self._lib, self.index = runtime, index
        self._call("cudaSetDevice", index, error=ProviderError)
        properties = self._call("cudaGetDeviceProperties", index)
        self.name = bytes(properties.name).split(b"\0")[0].decode()
        self.sm = f"sm{properties.major}{properties.minor}"

    def _call(self, name: str, *arguments: Any, error: type[Exception] = EngineRunError) -> Any:
        status, *results = getattr(self._lib, name)(*arguments)
        if status != self._lib.cudaError_t.cudaSuccess:
            found = f"{name}: {status.name}"
            if error is ProviderError:
                raise ProviderError(
                    "no usable GPU",
                    expected="an NVIDIA driver and a GPU",
                    got=found,
                    remedy="ldlm doctor says what is missing; --runtime ort runs on the CPU",
                )
            raise EngineRunError("a CUDA call failed", got=found)
        return results[0] if len(results) == 1 else results

    def use(self) -> None:
        """Make it the calling thread's GPU: a new thread has the machine's first one."""
        self._call("cudaSetDevice", self.index)

    def allocate(self, size: int) -> int:
        """Device memory of `size` bytes, 256-byte aligned."""
        return int(self._call("cudaMalloc", max(size, 1)))

    def free(self, pointer: int) -> None:
        """Give memory back."""
        self._call("cudaFree", pointer)

    def stream(self) -> int:
        """A new stream."""
        return int(self._call("cudaStreamCreateWithFlags", self._lib.cudaStreamNonBlocking))

    def pinned(self, size: int) -> Float32s:
        """[size] in page-locked host memory; an upload reads it when its turn comes, not before."""
        pointer = int(self._call("cudaMallocHost", 4 * size))
        memory = (ctypes.c_float * size).from_address(pointer)
        # Arrays over it keep it alive.
        weakref.finalize(memory, self._lib.cudaFreeHost, pointer).atexit = False
        return np.ctypeslib.as_array(memory)

    def upload(self, pointer: int, array: Array, stream: int) -> None:
        """Copy a contiguous array to the device, in stream order.

        One that is not pinned may be changed as soon as this returns.
        """
        kind = self._lib.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy within the device, in stream order."""
        kind = self._lib.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", target, source, size, kind, stream)

    def download(self, array: Array, pointer: int, stream: int) -> None:
        """Copy from the device into a contiguous array, after all earlier work of the stream."""
        kind = self._lib.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, pointer, array.nbytes, kind, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done its work."""
        self._call("cudaStreamSynchronize", stream)

    def event(self) -> int:
        """A new event, a mark in a stream's work."""
        return int(self._call("cudaEventCreate"))

    def record(self, event: int, stream: int) -> None:
        """Put an event behind the work that the stream has so far."""
        self._call("cudaEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """Wait until the device has reached an event."""
        self._call("cudaEventSynchronize", event)

    def elapsed(self, first: int, second: int) -> float:
        """Seconds from one event to another, both of them reached."""
        return 1e-3 * float(self._call("cudaEventElapsedTime", first, second))

    def drop(self, event: int) -> None:
        """Destroy an event."""
        self._call("cudaEventDestroy", event)

    @contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """A context: what is enqueued in it is recorded, not run; it gives the graph at its end."""
        captured: list[int] = []
        mode = self._lib.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            yield captured
        except BaseException:
            self._lib.cudaStreamEndCapture(stream)  # leaves the stream usable
            raise
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            captured.append(int(self._call("cudaGraphInstantiate", graph, 0)))
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        """Run a captured graph."""
        self._call("cudaGraphLaunch", graph, stream)

    def forget(self, graph: int) -> None:
        """Destroy a captured graph."""
        self._call("cudaGraphExecDestroy", graph)
