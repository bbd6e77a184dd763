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
DONE = "done"
PATIENCE = 30.0  # seconds that a worker has to end by itself
Report = Callable[[str, int, int], None]
Progress = Callable[[str, str, int, int], None]
Told = Callable[[str], None]


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


def run_told(jobs: Iterable[Job], progress: Told, workers: int | None) -> dict[str, Any]:
    """`run_jobs`, told in one line: what runs, how much is done, how long the rest may take."""
    jobs = list(jobs)
    running: dict[str, str] = {}
    done: list[str] = []
    began = time.monotonic()

    def tell(name: str, phase: str, _step: int, _steps: int) -> None:
        running[name] = phase
        if phase == DONE:
            done.append(running.pop(name))
        text = "; ".join(f"{job}: {what}" for job, what in running.items())
        if done and running:
            left = (time.monotonic() - began) / len(done) * (len(jobs) - len(done))
            text += f" ({len(done)} of {len(jobs)}, about {left:.0f} s left)"
        if text:
            progress(text)

    return run_jobs(jobs, tell, workers=workers)


class _Worker:
    """A process that runs jobs, one at a time."""

    def __init__(self, threads: int) -> None:
        self.job: Job | None = None
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
        self.job = job
        with contextlib.suppress(BrokenPipeError):  # it died: `receive` says so
            self.link.send(job.run)

    def receive(self, job: Job) -> tuple[str, Any]:
        """What it says next: ("report", ...), ("result", ...) or ("error", ...)."""
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
                running = self.running()
                ready = wait([worker.link for worker, _ in running])
                for worker, job in running:
                    if worker.link in ready:
                        self.hear(worker, job)
        finally:
            _end(self.workers)
        return self.results

    def running(self) -> list[tuple[_Worker, Job]]:
        return [(worker, worker.job) for worker in self.workers if worker.job is not None]

    def hear(self, worker: _Worker, job: Job) -> None:
        kind, value = worker.receive(job)
        if kind == "error":
            raise value
        if kind == "result":
            self.results[job.name], worker.job = value, None
            value = (DONE, 1, 1)
        self.progress(job.name, *value)

    def start_what_fits(self) -> None:
        for job in [j for j in self.left if self.results.keys() >= set(j.after)]:
            held = sum(running.memory for _, running in self.running())
            idle = [worker for worker in self.workers if worker.job is None]
            if held and held + job.memory > self.budget:
                _end(idle)  # they hold memory, and it waits for it
                self.workers = [worker for worker in self.workers if worker not in idle]
                continue
            if not idle:
                if len(self.workers) == self.limit:
                    return
                idle = [_Worker(max(1, cores() // self.limit))]
                self.workers += idle
            idle[0].start(job)
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
