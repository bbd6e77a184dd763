"""Jobs for the tests of worker processes: importable there, unlike a test's own functions."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engines.artifacts.jobs import Job, run_jobs
from ldlm import files
from ldlm.errors import ExportError

Report = Callable[[str], None]


def note(log: Path, name: str, seconds: float, report: Report) -> tuple[str, int]:
    """Write when it began and ended; its name and its process."""
    report("working")
    for word, pause in (("begins", seconds), ("ends", 0.0)):
        with log.open("a") as file:
            file.write(f"{word} {name}\n")
        time.sleep(pause)
    return name, os.getpid()


def threads(_report: Report) -> str:
    return os.environ["OMP_NUM_THREADS"]


def fail(_report: Report) -> None:
    raise ExportError("it does not work", stage="denoiser", expected=1, got="2", remedy="none")


def fail_strangely(_report: Report) -> None:
    raise StrangeError(lambda: None)


class StrangeError(Exception):
    """What cannot be pickled."""


def die(_report: Report) -> None:
    os._exit(9)


def stage_slowly(folder: Path, report: Report) -> None:
    """Hold a temporary folder until somebody ends this process."""
    with files.staging_folder(folder):
        report("staging")
        time.sleep(60)


def fail_when_staged(folder: Path, _report: Report) -> None:
    while not list(folder.glob(f"{files.PARTIAL}*")):
        time.sleep(0.01)
    fail(_report)


def main(folder: Path, log: Path) -> None:
    """Two jobs that take long, in a process that a test ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    jobs = [Job(str(n), functools.partial(stage_slowly, folder), 1) for n in range(2)]

    def progress(said: str) -> None:
        with log.open("a") as file:
            file.write(f"{said}\n")

    run_jobs(jobs, progress, workers=2, budget=10)
