"""The process of one peer: what runs in it, and how it is asked."""

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from engines.bench.peers import load
from engines.memory import peak_bytes, reset_peak
from ldlm.errors import BenchError, LDLMError, installs
from ldlm.noise import NoiseStream
from ldlm.sampler import Stages
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

STEP = "step"
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What is timed: a step of the loop or a call of a decoder, at a batch and a length."""

    what: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.what}, batch {self.batch}, length {self.length}"


@dataclass(frozen=True)
class Timing:
    """What a peer measured in one turn.

    Attributes:
        seconds: of every step or call.
        outside: share of the loop's time outside the graph.
        peak: bytes of the peer's process in this turn.
    """

    seconds: list[float]
    outside: float | None = None
    peak: int = 0


class Worker:
    """A process of one peer's own; what a library prints there is kept for its last words."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # open as long as the process
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _print_into, (self._output.name,))
        others = set(multiprocessing.active_children())
        self._pool.submit(os.getpid)
        (self._process,) = set(multiprocessing.active_children()) - others

    def ask(self, function: Callable[..., T], *arguments: object) -> T:
        """What a function gives in the process.

        Raises:
            BenchError: it cannot answer, with its own reason; the process is ended.
        """
        try:
            return self._pool.submit(function, *arguments).result()
        except Exception as error:  # the libraries' exceptions share no base but this one
            reason = self._reason(error)
            self.close()
            raise BenchError("a peer cannot run", tensor=self.peer, got=reason) from error

    def _reason(self, error: Exception) -> str:
        if isinstance(error, BrokenProcessPool):
            last = self._output.read()[-500:].decode(errors="replace").strip()
            return f"its process ended: {last or 'without a word'}"
        if isinstance(error, ImportError):
            return f"{error}\n  remedy:   {installs('build')}"
        return str(error) if isinstance(error, LDLMError) else repr(error)

    def close(self) -> None:
        """End the process; what it is still at is waited for 10 seconds."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._process.join(10)
        self._process.kill()
        self._output.close()


def _print_into(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@functools.cache
def _loaded(peer: str, folder: Path, checkpoint: Path) -> Stages:
    return load(peer, folder, checkpoint)


def prepare(peer: str, folder: Path, checkpoint: Path) -> None:
    """Load a peer in this process, once; see `engines.bench.peers.load`."""
    _loaded(peer, folder, checkpoint)


def timed(peer: str, folder: Path, checkpoint: Path, case: Case, repeats: int) -> Timing:
    """Time a peer's steps or calls in this process."""
    stages = _loaded(peer, folder, checkpoint)
    reset_peak()
    timing = (loop if case.what == STEP else decoder)(stages, case, repeats)
    return replace(timing, peak=peak_bytes())


def loop(stages: Stages, case: Case, repeats: int) -> Timing:
    """Some steps of a sampling run: seconds per step, and those inside the graph.

    Two steps more are run and left out: the first, which makes the buffers, and the last, which
    adds no noise.
    """
    schedule = TangentSchedule()
    run = stages.loop(step_table("ddpm", schedule, schedule.grid(repeats + 2)))
    ticks = [(time.perf_counter(), step.seconds) for step in run(_noise(stages, case))]
    times, inside = zip(*ticks[:-1], strict=True)
    outside = 1 - sum(inside[1:]) / (times[-1] - times[0])
    return Timing(np.diff(times).tolist(), outside)


def decoder(stages: Stages, case: Case, repeats: int) -> Timing:
    """Some calls of a decoder: seconds per call."""
    z = _noise(stages, case).draw()
    stage = getattr(stages, case.what)
    times = [time.perf_counter()]
    for _ in range(repeats):
        done = stage(z)
        if hasattr(done, "numpy"):  # on a device it is only enqueued
            done.numpy()
        times.append(time.perf_counter())
    return Timing(np.diff(times).tolist())


def _noise(stages: Stages, case: Case) -> NoiseStream:
    return NoiseStream(0, range(case.batch), (case.length, stages.config.d_model))
