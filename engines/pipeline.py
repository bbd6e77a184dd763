"""From a checkpoint to verified engines: the components side by side.

Every component in every precision is exported, then proved, then built, and each of these is a job
for a worker process (`engines.artifacts.jobs`). While one component is proved another is exported.
The first gate that fails stops everything; what was finished stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.export import Export
from engines.artifacts.ingredients import Decision, latest
from engines.artifacts.jobs import Job, Told, run_jobs
from engines.compile.target import chosen_target
from engines.memory import job_memory
from engines.proof.questions import NOTHING_MORE
from engines.proof.saved import read, reasons
from engines.proof.update import update
from engines.tensorrt.profiles import profiles
from engines.tensorrt.targets import RTX
from export.precision import Precision
from export.stages import compiled


@dataclass(frozen=True)
class Asked:
    """What engines are asked for, in words that a worker process can be sent.

    Attributes:
        checkpoint, folder, precisions, workers: see `engines.artifacts.export.Export`.
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
    workers: int | None = None

    def build(self) -> Build:
        """The build of what is in the folder.

        Raises:
            ConfigError, ProviderError: something that there is not.
        """
        config = folders.load(self.folder).config
        ranges = profiles(config, self.names, self.batch, self.length)
        return Build(self.folder, chosen_target(self.target, self.sms), ranges)


def make_engines(asked: Asked, progress: Told) -> dict[str, list[Decision]]:
    """Export, prove and build what has changed.

    Args:
        asked: of what.
        progress: see `engines.artifacts.jobs.run_jobs`.

    Returns:
        By "export", "verify" and "build": of every component or engine, whether that was done, and
        why.

    Raises:
        ParityError: the first gate that does not hold.
        ConfigError, CheckpointError, ArtifactError, ExportError, EngineBuildError, DiskSpaceError:
            as the steps.
    """
    chosen_target(asked.target, asked.sms)  # wrong words are refused before the long work
    for name in asked.precisions:
        Precision.of(name).require(asked.target)
    export = Export(asked.checkpoint, asked.folder, asked.precisions, asked.workers)
    exported, waiting = export.begin(progress)
    exports = {job.name: job for job in waiting}
    made: dict[str, list[Decision]] = {"export": exported, "verify": [], "build": []}
    jobs: list[Job] = []
    for item in export.wanted:
        jobs += _chain(asked, item.precision, item.component, exports.get(f"export {item}"), made)
    for name, decisions in run_jobs(jobs, progress, workers=export.workers).items():
        made[name.partition(" ")[0]] += decisions
    return {kind: latest(decisions) for kind, decisions in made.items()}


def _chain(
    asked: Asked,
    precision: str,
    component: str,
    export: Job | None,
    made: dict[str, list[Decision]],
) -> list[Job]:
    """The jobs of a component, each after the one before it; what is known by now goes to `made`.

    They return Decisions where that was not known.
    """
    key, stages = f"{precision} {component}", compiled(component)
    jobs = [] if export is None else [export]

    def add(kind: str, run: Callable[[Told], list[Decision]]) -> None:
        memory = job_memory(kind, asked.checkpoint, component)
        jobs.append(Job(f"{kind} {key}", run, memory, tuple(job.name for job in jobs)))

    why = (
        ("exported anew",)
        if jobs
        else reasons(
            read(asked.folder), folders.load(asked.folder), precision, NOTHING_MORE, [component]
        )
    )
    made["verify"].append(Decision(key, why))
    if why:
        add("verify", functools.partial(_verify, asked, precision, component))
    engines = [] if jobs else asked.build().decisions(precision, stages)
    made["build"] += engines
    if stages and (jobs or any(decision.reasons for decision in engines)):
        add("build", functools.partial(_build, asked, precision, stages))
    return jobs


def _verify(asked: Asked, precision: str, component: str, report: Told) -> list[Decision]:
    found = update(asked.folder, asked.checkpoint, [precision], stages=[component], progress=report)
    found.save()
    found.new.require_passed()
    return []


def _build(asked: Asked, precision: str, stages: Sequence[str], report: Told) -> list[Decision]:
    return asked.build().run([precision], lambda what, _step, _steps: report(what), stages)
