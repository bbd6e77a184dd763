"""The few CUDA calls that the TensorRT runtime makes, with errors as exceptions. No torch."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import EngineRunError, ProviderError, installs

Array = NDArray[Any]
Float32s = NDArray[np.float32]


class Device(Protocol):
    """A GPU as the stages see it; pointers and handles are plain integers.

    Attributes:
        index: which of the machine's GPUs.
        sm: its compute capability, such as "sm89".
        name: as the driver has it.
    """

    index: int
    sm: str
    name: str

    def allocate(self, size: int) -> int:
        """Device memory of `size` bytes, 256-byte aligned."""

    def free(self, pointer: int) -> None:
        """Give memory back."""

    def stream(self) -> int:
        """A new stream."""

    def pinned(self, size: int) -> Float32s:
        """[size] in page-locked host memory; an upload reads it when its turn comes, not before."""

    def upload(self, pointer: int, array: Array, stream: int) -> None:
        """Copy a contiguous array to the device, in stream order.

        One that is not pinned may be changed as soon as this returns.
        """

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy within the device, in stream order."""

    def download(self, array: Array, pointer: int, stream: int) -> None:
        """Copy from the device into a contiguous array, after all earlier work of the stream."""

    def synchronize(self, stream: int) -> None:
        """Wait until the stream has done its work."""

    def event(self) -> int:
        """A new event, a mark in a stream's work."""

    def record(self, event: int, stream: int) -> None:
        """Put an event behind the work that the stream has so far."""

    def wait(self, event: int) -> None:
        """Wait until the device has reached an event."""

    def elapsed(self, first: int, second: int) -> float:
        """Seconds from one event to another, both of them reached."""

    def drop(self, event: int) -> None:
        """Destroy an event."""

    def capture(self, stream: int) -> Any:
        """A context: what is enqueued in it is recorded, not run; see `Captured`."""

    def launch(self, graph: int, stream: int) -> None:
        """Run a captured graph."""

    def forget(self, graph: int) -> None:
        """Destroy a captured graph."""


@dataclass
class Captured:
    """The graph that a capture has recorded: set when its context ends."""

    graph: int = 0


class Cuda:
    """`Device` on CUDA's runtime.

    Args:
        index: which GPU.

    Raises:
        ProviderError: no CUDA bindings, no driver, or no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise ProviderError(
                "TensorRT needs CUDA's Python bindings",
                got=str(error),
                remedy=installs("rtx"),
            ) from error
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

    def allocate(self, size: int) -> int:
        return int(self._call("cudaMalloc", max(size, 1)))

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def stream(self) -> int:
        flags = self._lib.cudaStreamNonBlocking
        return int(self._call("cudaStreamCreateWithFlags", flags))

    def pinned(self, size: int) -> Float32s:
        pointer = int(self._call("cudaMallocHost", 4 * size))
        memory = (ctypes.c_float * size).from_address(pointer)
        # Arrays over it keep it alive.
        weakref.finalize(memory, self._lib.cudaFreeHost, pointer).atexit = False
        return np.ctypeslib.as_array(memory)

    def upload(self, pointer: int, array: Array, stream: int) -> None:
        kind = self._lib.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        kind = self._lib.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", target, source, size, kind, stream)

    def download(self, array: Array, pointer: int, stream: int) -> None:
        kind = self._lib.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, pointer, array.nbytes, kind, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def event(self) -> int:
        return int(self._call("cudaEventCreate"))

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait(self, event: int) -> None:
        self._call("cudaEventSynchronize", event)

    def elapsed(self, first: int, second: int) -> float:
        return 1e-3 * float(self._call("cudaEventElapsedTime", first, second))

    def drop(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    @contextmanager
    def capture(self, stream: int) -> Iterator[Captured]:
        captured = Captured()
        mode = self._lib.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            yield captured
        except BaseException:
            self._lib.cudaStreamEndCapture(stream)  # leaves the stream usable
            raise
        graph = self._call("cudaStreamEndCapture", stream)
        try:
            captured.graph = int(self._call("cudaGraphInstantiate", graph, 0))
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def forget(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", graph)


class DeviceArray:
    """A tensor in device memory that a stage owns; the next run of the stage overwrites it.

    Other libraries read it in place: `torch.from_dlpack(array)`, `cupy.asarray(array)`.

    Args:
        device, stream: whose memory, and which stream fills it.
        pointer: where it begins.
        shape, dtype: of its present content.
    """

    def __init__(
        self, device: Device, stream: int, pointer: int, shape: tuple[int, ...], dtype: str
    ) -> None:
        self.device, self.stream, self.pointer = device, stream, pointer
        self.shape, self.dtype = shape, np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Size of the present content."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def is_of(self, device: Device, stream: int) -> bool:
        """Whether this stream of this device fills it, so that its work comes in order."""
        return (self.device, self.stream) == (device, stream)

    def numpy(self) -> Array:
        """A copy on the host."""
        array = np.empty(self.shape, self.dtype)
        self.device.download(array, self.pointer, self.stream)
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "stream": self.stream,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device.index)  # kDLCUDA

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule; the stream has done its work when it is handed out.

        Whoever takes it must have read it before the stage runs again.
        """
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        self.device.synchronize(self.stream)
        buffer = Buffer.from_handle(self.pointer, self.nbytes, owner=self)
        view = StridedMemoryView.from_buffer(buffer, shape=self.shape, dtype=self.dtype)
        return view.__dlpack__(**options)


@dataclass(frozen=True)
class Foreign:
    """A contiguous tensor of another library, on the device."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def foreign(tensor: Any, stream: int, device: int) -> Foreign:
    """Look at a tensor through DLPack or the CUDA array interface; its stream is waited for.

    Args:
        tensor: of another library.
        stream: that will read it.
        device: the GPU it must be on.

    Raises:
        EngineRunError: it has neither, is not on the device, or is not contiguous.
    """
    from cuda.core.utils import StridedMemoryView

    try:
        view = StridedMemoryView.from_any_interface(tensor, stream_ptr=stream)
        dtype = np.dtype(view.dtype)
    except (BufferError, RuntimeError, TypeError, AttributeError) as error:
        raise EngineRunError(
            "an input is neither a NumPy array nor a tensor on the device",
            expected="DLPack or the CUDA array interface, and a dtype that NumPy has",
            got=f"{type(tensor).__name__}: {error}",
        ) from error
    shape, size = tuple(view.shape), int(np.prod(view.shape)) * dtype.itemsize
    if view.device_id != device or not _is_dense(shape, view.strides):
        raise EngineRunError(
            "an input cannot be read in place",
            expected=f"contiguous, on device {device}",
            got=f"shape {shape}, strides {view.strides}, device {view.device_id}",
        )
    return Foreign(view.ptr, shape, dtype.name, size)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether elements follow one another in C order; an axis of one element has no say."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
