"""What one run uses at a time, kept for the next one that needs the same."""

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

IDLE = 8  # kept for later runs; the one used longest ago makes room


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
        self._idle: OrderedDict[K, list[V]] = OrderedDict()
        # A garbage collector may give back in the middle of anything: it takes no lock.
        self._returned: deque[tuple[K, V]] = deque()
        self._open = True

    def take(self, key: K, make: Callable[[], V]) -> Lease[V]:
        """An idle thing of this key, or a new one."""
        with self._lock:
            dropped = self._sort()
            idle = self._idle.get(key)
            found = idle.pop() if idle else None
        del dropped  # not in the lock: what is dropped may have work to do
        return Lease(make() if found is None else found, functools.partial(self._give_back, key))

    def close(self) -> None:
        """Drop all that is idle, and from now on all that comes back."""
        self._open = False
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        del idle
        self._returned.clear()

    def _give_back(self, key: K, thing: V) -> None:
        self._returned.append((key, thing))
        if not self._open:
            self._returned.clear()

    def _sort(self) -> list[V]:
        """Make idle what was given back; what has no place."""
        with contextlib.suppress(IndexError):  # another thread may have closed the pool
            while self._returned:
                key, thing = self._returned.popleft()
                self._idle.setdefault(key, []).append(thing)
                self._idle.move_to_end(key)
        dropped = []
        while sum(map(len, self._idle.values())) > IDLE:
            key, idle = next(iter(self._idle.items()))
            dropped += idle[:1]
            del idle[:1]
            if not idle:
                del self._idle[key]
        return dropped
