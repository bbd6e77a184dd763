"""What one run uses at a time, kept for the next one that needs the same."""

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

IDLE = 8  # kept for later runs; the one that came back longest ago makes room


class Lease(Generic[V]):
    """A thing in the hands of one run: idle again when the last reference to the lease goes.

    As a context it gives the thing, and drops it after an error: what it holds is not known then.

    Attributes:
        thing: what was taken.
    """

    def __init__(self, thing: V, give_back: Callable[[V], None]) -> None:
        self.thing = thing
        self._return = weakref.finalize(self, give_back, thing)
        self._return.atexit = False

    def __enter__(self) -> V:
        return self.thing

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A generator that is closed was cancelled between two steps, which is no error.
        if kind is not None and not issubclass(kind, GeneratorExit):
            self._return.detach()


class Pool(Generic[K, V]):
    """Things by key: each is in the hands of one run, or idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The latest comes last. A garbage collector may give back in the middle of anything: it
        # adds at the end, and takes no lock.
        self._idle: list[tuple[K, V]] = []
        self._open = True

    def take(self, key: K, make: Callable[[], V]) -> Lease[V]:
        """An idle thing of this key, or a new one."""
        with self._lock:
            keys = [known for known, _ in self._idle]
            found = [self._idle.pop(keys.index(key))[1]] if key in keys else []
            dropped = self._idle[:-IDLE]
            del self._idle[: len(dropped)]
        del dropped  # not in the lock: what is dropped may have work to do
        thing = found.pop() if found else make()
        return Lease(thing, functools.partial(self._give_back, key))

    def close(self) -> None:
        """Drop all that is idle, and from now on all that comes back."""
        self._open = False
        with self._lock:
            idle, self._idle = self._idle, []
        del idle

    def _give_back(self, key: K, thing: V) -> None:
        self._idle.append((key, thing))
        if not self._open:
            self._idle.clear()
