"""From a checkpoint to verified engines: the components side by side.

Every component in every precision is exported, then proved, then built, and each of these is a job
for a worker process (`engines.artifacts.jobs`). While one component is proved another is exported.
The first gate that fails stops everything; what was finished stays.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.export import Export, Wanted
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
        jobs += _chain(asked, item, exports.get(f"export {item}"), made)
    for name, decisions in run_jobs(jobs, progress, workers=export.workers).items():
        made[name.partition(" ")[0]] += decisions
    return {kind: latest(decisions) for kind, decisions in made.items()}


def _chain(
    asked: Asked, item: Wanted, export: Job | None, made: dict[str, list[Decision]]
) -> list[Job]:
    """The jobs of a component, each after the one before it; `made` gets what is decided by now."""
    jobs, stages = [] if export is None else [export], compiled(item.component)

    def add(kind: str, run: Callable[[Asked, Wanted, Told], list[Decision]]) -> None:
        memory = job_memory(kind, asked.checkpoint, item.component)
        after = tuple(job.name for job in jobs)
        jobs.append(Job(f"{kind} {item}", functools.partial(run, asked, item), memory, after))

    if export is None:
        saved, manifest = read(asked.folder), folders.load(asked.folder)
        why = reasons(saved, manifest, item.precision, NOTHING_MORE, [item.component])
        engines = asked.build().decisions(item.precision, stages)
    else:
        why = ("exported anew",)
        engines = [Decision(f"{item.precision} {stage}", why) for stage in stages]
    made["verify"].append(Decision(str(item), why))
    made["build"] += engines
    if why:
        add("verify", _verify)
    if any(decision.reasons for decision in engines):
        add("build", _build)
    return jobs


def _verify(asked: Asked, item: Wanted, report: Told) -> list[Decision]:
    stages = [item.component]
    found = update(asked.folder, asked.checkpoint, [item.precision], stages=stages, progress=report)
    found.save()
    found.new.require_passed()
    return []


def _build(asked: Asked, item: Wanted, report: Told) -> list[Decision]:
    stages = compiled(item.component)
    return asked.build().run([item.precision], lambda what, *_: report(what), stages)
