"""Jobs side by side in worker processes, within a memory budget.

A job starts when the jobs that it comes after are done, a worker is free, and its memory fits
beside that of the running ones. A job too large for the budget runs alone. Each worker is an
interpreter of its own with its share of the cores as threads; what it runs, returns and raises is
pickled. A worker does not import the caller's main module, so a script needs no guard.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from engines.memory import available_bytes, cores
from ldlm.errors import LDLMError

SHARE = 0.8  # of the available memory; the rest is for the system and for errors of the estimates
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PATIENCE = 30.0  # seconds that a worker has to end by itself
Told = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        name: unique among the jobs.
        run: picklable, of a module that a worker can import, which the caller's main module is
            not; called with a function that it tells in words what it is doing.
        memory: bytes that its process holds at most, everything counted.
        after: names of jobs that must be done before it starts; they come before it.
    """

    name: str
    run: Callable[[Told], Any]
    memory: int
    after: tuple[str, ...] = ()


def run_jobs(
    jobs: Sequence[Job], progress: Told, *, workers: int | None = None, budget: int | None = None
) -> dict[str, Any]:
    """Run all jobs; in this process, one after the other, where no two could run together.

    The first error stops everything: workers are asked to end, which removes their temporary
    folders, and the error is raised as itself. The same on Ctrl-C and SIGTERM.

    Args:
        jobs: earlier ones first, where there is a choice.
        progress: told in one line what runs, how much is done, how long the rest may take.
        workers: at most so many processes; default: as many as there are cores.
        budget: bytes for the running jobs together; default: 80 % of what is available.

    Returns:
        By name, what each job returned.

    Raises:
        LDLMError: a worker died; otherwise whatever the first failing job raised.
        ValueError: a job does not come after one that it waits for.
    """
    budget = int(SHARE * available_bytes()) if budget is None else budget
    workers = min(cores() if workers is None else workers, len(jobs))
    for number, job in enumerate(jobs):
        if missing := set(job.after) - {earlier.name for earlier in jobs[:number]}:
            raise ValueError(f"{job.name} does not come after {', '.join(sorted(missing))}")
    smallest = sum(sorted(job.memory for job in jobs)[:2])
    run = _Run(jobs, progress)
    if workers > 1 and smallest <= budget:
        run.in_workers(workers, budget)
    else:
        run.here()
    return run.results


class _Run:
    """One `run_jobs`: what is left, what runs and what is done."""

    def __init__(self, jobs: Sequence[Job], progress: Told) -> None:
        self.jobs, self.left, self.progress = jobs, list(jobs), progress
        self.phases: dict[str, str] = {}  # of the jobs that run
        self.results: dict[str, Any] = {}
        self.idle: list[_Worker] = []
        self.running: dict[_Worker, Job] = {}
        self.began = time.monotonic()

    def here(self) -> None:
        for job in self.jobs:
            self.done(job, job.run(functools.partial(self.doing, job)))

    def in_workers(self, limit: int, budget: int) -> None:
        try:
            while self.left or self.running:
                self.start_what_fits(limit, budget)
                ready = wait([worker.link for worker in self.running])
                for worker in [worker for worker in self.running if worker.link in ready]:
                    self.hear(worker)
        finally:
            _end([*self.idle, *self.running])

    def start_what_fits(self, limit: int, budget: int) -> None:
        for job in [j for j in self.left if self.results.keys() >= set(j.after)]:
            held = sum(running.memory for running in self.running.values())
            if held and held + job.memory > budget:
                _end(self.idle)  # they hold memory, and it waits for it
                self.idle = []
            elif self.idle or len(self.running) < limit:
                worker = self.idle.pop() if self.idle else _Worker(max(1, cores() // limit))
                self.running[worker] = job
                self.left.remove(job)
                worker.start(job)

    def hear(self, worker: _Worker) -> None:
        job = self.running[worker]
        kind, value = worker.receive(job)
        if kind == "error":
            raise value
        if kind == "doing":
            self.doing(job, value)
        else:
            self.idle.append(worker)
            del self.running[worker]
            self.done(job, value)

    def doing(self, job: Job, phase: str) -> None:
        self.phases[job.name] = phase
        self.tell()

    def done(self, job: Job, result: Any) -> None:
        self.phases.pop(job.name, None)
        self.results[job.name] = result
        self.tell()

    def tell(self) -> None:
        if not self.phases:
            return
        text = "; ".join(f"{name}: {phase}" for name, phase in self.phases.items())
        if done := len(self.results):
            begun = done + len(self.phases) / 2  # on average, half of a running job is done
            left = (time.monotonic() - self.began) / begun * (len(self.jobs) - begun)
            text += f" ({done} of {len(self.jobs)}, about {left:.0f} s left)"
        self.progress(text)


class _Worker:
    """A process that runs jobs, one at a time."""

    def __init__(self, threads: int) -> None:
        self.link, theirs = Pipe()
        environment = os.environ | dict.fromkeys(THREADS, str(threads))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        script = f"from {__name__} import serve; serve({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

    def start(self, job: Job) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: `receive` says so
            self.link.send(job.run)

    def receive(self, job: Job) -> tuple[str, Any]:
        """What it says next: ("doing", ...), ("result", ...) or ("error", ...)."""
        try:
            kind, value = self.link.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait()
            raise LDLMError(
                f"a worker process died while it ran {job.name}",
                expected="an answer",
                got=f"signal {-status}" if status < 0 else f"exit status {status}",
                remedy="where memory was short: run fewer at a time",
            ) from None
        return kind, value


def _end(workers: Iterable[_Worker]) -> None:
    """Ask all to end at once, then wait for each."""
    for worker in workers:
        worker.process.terminate()
        worker.link.close()
    for worker in workers:
        try:
            worker.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:  # deep in a library: `ldlm gc` removes what it leaves
            worker.process.kill()
            worker.process.wait()


def serve(descriptor: int) -> None:
    """The worker's side: run what comes until nothing more comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    link = Connection(descriptor)
    said = ""

    def report(phase: str) -> None:
        nonlocal said
        if phase != said:  # of every step that a build reports
            said = phase
            link.send(("doing", phase))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run, said = link.recv(), ""
            try:
                answer = ("result", run(report))
            except Exception as error:
                answer = ("error", _sendable(error))
            link.send(answer)


def _sendable(error: Exception) -> Exception:
    """The error itself, or its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
