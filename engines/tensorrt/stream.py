"""A stream that threads share, and tensors in its device's memory."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from engines.tensorrt.device import Array, Cuda
from ldlm.errors import EngineRunError, StageInputError


class Stream:
    """A new stream of a device: its work is done in order, whichever thread enqueues it.

    Attributes:
        device: the GPU.
        handle: as the device's functions take it; to be used in a turn.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.handle = device, device.stream()
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which no other thread enqueues: what belongs together, or is captured.

        For single steps: a generator that held it across a `yield` would stop everyone.
        """
        with self._lock:
            self.device.use()
            self._catch_up()
            yield

    def when_gone(self, owner: object, work: Callable[..., object], *arguments: Any) -> None:
        """Let `work(*arguments)` follow the end of an object; the latest comes first.

        It waits for a moment when nobody enqueues: memory must not be freed inside a capture, and
        a garbage collector does not know of it.
        """
        call = functools.partial(work, *arguments)
        weakref.finalize(owner, self._later, call).atexit = False

    def allocate(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Memory that is given back when the array goes."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = DeviceArray(self, self.device.allocate(size), shape, dtype)
        self.when_gone(array, self.device.free, array.pointer)
        return array

    def wait(self) -> None:
        """Wait for all that was enqueued so far, while others enqueue more."""
        with self.turn():
            event = self.device.event()
            self.device.record(event, self.handle)
        try:
            self.device.wait(event)
        finally:
            self.device.drop(event)

    def _later(self, work: Callable[[], object]) -> None:
        self._waiting.append(work)
        # Not where the lock is this thread's own: the next turn does it.
        if self._lock.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


class DeviceArray:
    """A tensor in device memory, valid as long as it is held.

    Other libraries read it in place: `torch.from_dlpack(array)`, `cupy.from_dlpack(array)`.

    Args:
        stream: fills it.
        pointer: where it begins.
        shape, dtype: of its content.
        owner: what keeps the memory for it.
    """

    def __init__(
        self, stream: Stream, pointer: int, shape: tuple[int, ...], dtype: str, owner: object = None
    ) -> None:
        self.stream, self.shape, self.dtype = stream, shape, np.dtype(dtype)
        self._pointer, self._owner = pointer, owner

    @property
    def pointer(self) -> int:
        """Where it begins.

        Raises:
            EngineRunError: it was released.
        """
        if not self._pointer:
            raise EngineRunError("an array on the device is read after its release")
        return self._pointer

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def fill(self, source: Array | DeviceArray) -> None:
        """Copy another array into it, in stream order; in a turn."""
        device, handle = self.stream.device, self.stream.handle
        if isinstance(source, DeviceArray):
            device.copy(self.pointer, source.pointer, source.nbytes, handle)
        else:
            device.upload(self.pointer, source, handle)

    def release(self) -> None:
        """Let its memory be used again; it cannot be read any more."""
        self._pointer, self._owner = 0, None

    def numpy(self) -> Array:
        """A copy on the host.

        Raises:
            EngineRunError: it was released, or CUDA fails.
        """
        array, pointer = np.empty(self.shape, self.dtype), self.pointer
        self.stream.wait()
        with self.stream.turn():
            self.stream.device.download(array, pointer, self.stream.handle)
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.stream.device.index)  # kDLCUDA

    def __dlpack__(self, **options: Any) -> Any:
        """A capsule, which holds the array; the stream has done its work when it is handed out."""
        from cuda.core import Buffer
        from cuda.core.utils import StridedMemoryView

        self.stream.wait()
        buffer = Buffer.from_handle(self.pointer, self.nbytes, owner=self)
        view = StridedMemoryView.from_buffer(buffer, shape=self.shape, dtype=self.dtype)
        return view.__dlpack__(**options)


class Foreign(DeviceArray):
    """A contiguous tensor of another library, which the stream reads in place."""


def foreign(tensor: Any, stream: Stream) -> Foreign:
    """Look at a tensor through DLPack or the CUDA array interface; its stream is waited for.

    Args:
        tensor: of another library.
        stream: that will read it, on the device it must be on.

    Raises:
        StageInputError: it has neither.
        EngineRunError: it is not on the device, or is not contiguous.
    """
    if not (hasattr(tensor, "__dlpack__") or hasattr(tensor, "__cuda_array_interface__")):
        raise StageInputError(
            "an input is neither a NumPy array nor a tensor on the device",
            expected="numpy.ndarray, DLPack or the CUDA array interface",
            got=type(tensor).__name__,
            remedy="numpy.asarray(x, numpy.float32)",
        )
    from cuda.core.utils import StridedMemoryView

    try:
        with stream.turn():
            view = StridedMemoryView.from_any_interface(tensor, stream_ptr=stream.handle)
        dtype = np.dtype(view.dtype)
    except (BufferError, RuntimeError, TypeError, AttributeError, AssertionError) as error:
        raise EngineRunError(
            "an input is not a tensor on the device that can be read",
            expected="a CUDA device, and a dtype that NumPy has",
            got=f"{type(tensor).__name__}: {error}",
            remedy="of a tensor on the host, its NumPy array: x.numpy()",
        ) from error
    shape, device = tuple(view.shape), stream.device.index
    # Only flags are asked for: an element of one byte stands for each of the tensor's.
    strides = view.strides
    dense = strides is None or as_strided(np.empty(1, np.uint8), shape, strides).flags.c_contiguous
    if view.device_id != device or not dense:
        raise EngineRunError(
            "an input cannot be read in place",
            expected=f"contiguous, on device {device}",
            got=f"shape {shape}, strides {strides}, device {view.device_id}",
        )
    return Foreign(stream, view.ptr, shape, dtype.name, tensor)
