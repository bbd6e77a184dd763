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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from engines.memory import available_bytes, cores
from ldlm.errors import LDLMError

SHARE = 0.8  # of the available memory; the rest is for the system and for errors of the estimates
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DONE = "done"
PATIENCE = 30.0  # seconds that a worker has to end by itself
Report = Callable[[str, int, int], None]
Progress = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Job:
    """One piece of work.

    Attributes:
        name: unique among the jobs.
        run: picklable, of a module that a worker can import, which the caller's main module is
            not; called with a function that takes (phase, step, steps) to report.
        memory: bytes that its process holds at most, everything counted.
        after: names of jobs that must be done before it starts.
    """

    name: str
    run: Callable[[Report], Any]
    memory: int
    after: tuple[str, ...] = ()


def run_jobs(
    jobs: Sequence[Job],
    progress: Progress,
    *,
    workers: int | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """Run all jobs; in this process, one after the other, where no two could run together.

    The first error stops everything: workers are asked to end, which removes their temporary
    folders, and the error is raised as itself. The same on Ctrl-C and SIGTERM.

    Args:
        jobs: earlier ones first, where there is a choice.
        progress: told (job, phase, step, steps), and (job, "done", 1, 1) at a job's end.
        workers: at most so many processes; default: as many as there are cores.
        budget: bytes for the running jobs together; default: 80 % of what is available.

    Returns:
        By name, what each job returned.

    Raises:
        LDLMError: a worker died; otherwise whatever the first failing job raised.
        ValueError: a job comes after one that there is not, or after itself.
    """
    budget = int(SHARE * available_bytes()) if budget is None else budget
    workers = min(cores() if workers is None else workers, len(jobs))
    order = _in_order(jobs)
    smallest = sum(sorted(job.memory for job in jobs)[:2])
    if workers <= 1 or smallest > budget:
        results = {}
        for job in order:
            results[job.name] = job.run(functools.partial(progress, job.name))
            progress(job.name, DONE, 1, 1)
        return results
    return _Pool(order, progress, workers, budget).run()


def _in_order(jobs: Sequence[Job]) -> list[Job]:
    """As given, but each after those that it comes after."""
    left, order = list(jobs), list[Job]()
    while left:
        done = {job.name for job in order}
        ready = next((job for job in left if done.issuperset(job.after)), None)
        if ready is None:
            raise ValueError(f"jobs wait for one another: {', '.join(job.name for job in left)}")
        left.remove(ready)
        order.append(ready)
    return order


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
        self.job: Job | None = None

    def start(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(BrokenPipeError):  # it died: `receive` says so
            self.link.send(job.run)

    def receive(self) -> tuple[str, Any]:
        """What it says next: ("report", ...), ("result", ...) or ("error", ...).

        Raises:
            LDLMError: it died.
        """
        try:
            kind, value = self.link.recv()
        except (EOFError, ConnectionResetError):
            status = self.process.wait()
            name = self.job.name if self.job is not None else "no job"
            raise LDLMError(
                f"a worker process died while it ran {name}",
                expected="an answer",
                got=f"signal {-status}" if status < 0 else f"exit status {status}",
                remedy="where memory was short: run fewer at a time",
            ) from None
        return kind, value

    def end(self) -> None:
        self.link.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:  # deep in a library: `ldlm gc` removes what it leaves
            self.process.kill()
            self.process.wait()


class _Pool:
    """The state of one `run_jobs`."""

    def __init__(self, jobs: list[Job], progress: Progress, workers: int, budget: int) -> None:
        self.left, self.progress, self.limit, self.budget = jobs, progress, workers, budget
        self.workers: list[_Worker] = []
        self.results: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        try:
            while self.left or self.running():
                self.start_what_fits()
                links: Mapping[Any, _Worker] = {w.link: w for w in self.running()}
                for link in wait(list(links)):
                    self.hear(links[link])
        finally:
            for worker in self.workers:
                worker.process.terminate()  # all at once, before waiting for each
            for worker in self.workers:
                worker.end()
        return self.results

    def running(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.job is not None]

    def hear(self, worker: _Worker) -> None:
        kind, value = worker.receive()
        job = worker.job
        if kind == "error":
            raise value
        if job is not None and kind == "report":
            self.progress(job.name, *value)
        elif job is not None:
            self.results[job.name], worker.job = value, None
            self.progress(job.name, DONE, 1, 1)

    def start_what_fits(self) -> None:
        for job in list(self.left):
            held = sum(w.job.memory for w in self.running() if w.job is not None)
            if not self.results.keys() >= set(job.after):
                continue
            if held and held + job.memory > self.budget:
                for idle in [w for w in self.workers if w.job is None]:
                    self.workers.remove(idle)  # it holds memory, and waits for it
                    idle.end()
                continue
            idle_one = next((w for w in self.workers if w.job is None), None)
            if idle_one is None and len(self.workers) == self.limit:
                return
            if idle_one is None:
                idle_one = _Worker(max(1, cores() // self.limit))
                self.workers.append(idle_one)
            idle_one.start(job)
            self.left.remove(job)


def serve(descriptor: int) -> None:
    """The worker's side: run what comes until nothing more comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    link = Connection(descriptor)
    last = 0.0

    def report(phase: str, step: int, steps: int) -> None:
        nonlocal last
        if step in (0, steps) or time.monotonic() - last > 0.1:
            last = time.monotonic()
            link.send(("report", (phase, step, steps)))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            run = link.recv()
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
