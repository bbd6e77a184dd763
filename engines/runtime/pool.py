"""What one run uses at a time, kept for the next one that needs the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

IDLE = 8  # kept for later runs; the one used longest ago makes room


class Pool(Generic[K, V]):
    """Things by key: each is in the hands of one run, or idle.

    Args:
        dispose: told of what is dropped.
    """

    def __init__(self, dispose: Callable[[V], None] = lambda _: None) -> None:
        self._dispose = dispose
        self._lock = threading.Lock()
        self._idle: OrderedDict[K, list[V]] = OrderedDict()

    @contextmanager
    def taken(self, key: K, make: Callable[[], V]) -> Iterator[V]:
        """An idle thing of this key, or a new one; idle again when the block ends.

        After an error it is dropped: what it holds is not known.
        """
        with self._lock:
            idle = self._idle.get(key)
            found = idle.pop() if idle else None
        thing = make() if found is None else found
        try:
            yield thing
        except GeneratorExit:  # the run was cancelled between two steps
            self.give_back(key, thing)
            raise
        except BaseException:
            self._dispose(thing)
            raise
        self.give_back(key, thing)

    def give_back(self, key: K, thing: V) -> None:
        """Make a thing idle."""
        with self._lock:
            self._idle.setdefault(key, []).append(thing)
            self._idle.move_to_end(key)
            surplus = sum(map(len, self._idle.values())) > IDLE
            dropped = self._oldest() if surplus else None
        if dropped is not None:
            self._dispose(dropped)

    def clear(self) -> None:
        """Drop all that is idle."""
        with self._lock:
            things = [thing for idle in self._idle.values() for thing in idle]
            self._idle.clear()
        for thing in things:
            self._dispose(thing)

    def _oldest(self) -> V:
        key = next(key for key, idle in self._idle.items() if idle)
        return self._idle[key].pop(0)
