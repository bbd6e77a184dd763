"""From a checkpoint to verified engines: the components side by side.

Every component in every precision is exported, then proved, then built, and each of these is a job
for a worker process (`engines.artifacts.jobs`). While one component is proved another is exported.
The first gate that fails stops everything; what was finished stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engines.artifacts import folder as folders
from engines.artifacts.build import Build, build_artifacts
from engines.artifacts.export import Export, export_artifacts
from engines.artifacts.ingredients import Decision
from engines.artifacts.jobs import Job, Report, Told, run_told
from engines.artifacts.source import job_memory, workers_for
from engines.compile.target import Target, chosen_target
from engines.proof.questions import NOTHING_MORE
from engines.proof.saved import read, reasons
from engines.proof.update import update
from engines.tensorrt.profiles import Profiles, profiles
from engines.tensorrt.targets import RTX
from export.precision import Precision
from export.stages import compiled, components

# Peak memory of a process that proves or builds a component (`job_memory`). Measured at base: the
# most was 3.7 GB, for the proof of the float16 token decoder (0.27 GB of float32 parameters).
PROOF_FACTOR, BUILD_FACTOR = 9.0, 1.0


@dataclass(frozen=True)
class Asked:
    """What engines are asked for, in words that a worker process can be sent.

    Attributes:
        target, sms: see `engines.compile.target.chosen_target`.
        names, batch, length: see `engines.tensorrt.profiles.profiles`.
    """

    checkpoint: Path
    folder: Path
    precisions: tuple[str, ...]
    target: str = RTX
    sms: str = "all"
    names: Sequence[str] | None = None
    batch: Sequence[int] | None = None
    length: Sequence[int] | None = None

    def build(self) -> tuple[Target, Profiles]:
        """The target and the profiles.

        Raises:
            ConfigError, ProviderError: something that there is not.
        """
        config = folders.load(self.folder).config
        ranges = profiles(config, self.names, self.batch, self.length)
        return chosen_target(self.target, self.sms), ranges


@dataclass
class Made:
    """What was done, and why: by kind, a Decision on every file; and what was verified."""

    exported: list[Decision] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    built: list[Decision] = field(default_factory=list)


def make_engines(asked: Asked, progress: Told, *, workers: int | None = None) -> Made:
    """Export, prove and build what has changed.

    Args:
        asked: of what.
        progress: told in one line what runs, how much is done and how long the rest may take.
        workers: at most so many jobs at a time; default: as many as cores and memory allow.

    Raises:
        ParityError: the first gate that does not hold.
        ConfigError, CheckpointError, ArtifactError, ExportError, EngineBuildError, DiskSpaceError:
            as the steps.
    """
    chosen_target(asked.target, asked.sms)  # wrong words are refused before the long work
    for name in asked.precisions:
        Precision.of(name).require(asked.target)
    made = Made()
    export = Export(asked.checkpoint, asked.folder, asked.precisions)
    exports: dict[str, Job] = {}
    if export.replaces():
        arguments = (asked.checkpoint, asked.folder, asked.precisions, progress)
        made.exported = export_artifacts(*arguments, workers=workers)
    else:
        decisions, exports = export.pending()
        made.exported = [decision for decision in decisions.values() if not decision.reasons]
    jobs = [
        job
        for precision in asked.precisions
        for component in components()
        for job in _chain(asked, made, precision, component, exports)
    ]
    workers = workers_for(asked.checkpoint) if workers is None else workers
    for name, result in run_told(jobs, progress, workers).items():
        kind, _, rest = name.partition(" ")
        if kind == "export":
            made.exported.append(result)
        elif kind == "verify":
            made.verified.append(rest)
        else:
            made.built += result
    return made


def _chain(
    asked: Asked, made: Made, precision: str, component: str, exports: Mapping[str, Job]
) -> list[Job]:
    """The jobs of a component in a precision, each after the one before it."""
    key, stages = f"{precision} {component}", compiled(component)
    jobs = [replace(exports[key], name=f"export {key}")] if key in exports else []

    def add(kind: str, run: Callable[[Report], Any], factor: float) -> None:
        memory = job_memory(asked.checkpoint, component, factor)
        jobs.append(Job(f"{kind} {key}", run, memory, tuple(job.name for job in jobs)))

    if jobs or _unproved(asked, precision, component):
        add("verify", functools.partial(_verify, asked, precision, component), PROOF_FACTOR)
    kept = [] if jobs else Build(asked.folder, *asked.build()).decisions(precision, stages)
    if stages and (jobs or any(decision.reasons for decision in kept)):
        add("build", functools.partial(_build, asked, precision, stages), BUILD_FACTOR)
    else:
        made.built += kept
    return jobs


def _unproved(asked: Asked, precision: str, component: str) -> bool:
    manifest = folders.load(asked.folder)
    return bool(reasons(read(asked.folder), manifest, precision, NOTHING_MORE, [component]))


def _verify(asked: Asked, precision: str, component: str, report: Report) -> None:
    found = update(
        asked.folder,
        asked.checkpoint,
        [precision],
        stages=[component],
        progress=lambda text: report(text, 0, 1),
    )
    found.save()
    found.new.require_passed()


def _build(asked: Asked, precision: str, stages: Sequence[str], report: Report) -> list[Decision]:
    target, ranges = asked.build()
    return build_artifacts(asked.folder, [precision], target, ranges, report, stages)
