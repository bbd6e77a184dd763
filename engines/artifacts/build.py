"""Engines from the graphs of an artifacts folder, as far as anything has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts.digests import Digests
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import EngineEntry, FileEntry, GraphEntry
from engines.compile.target import Target
from engines.tensorrt.profiles import Profiles
from export.precision import Precision
from export.stages import compiled, stage
from ldlm import files


def build_artifacts(
    folder: Path,
    precisions: Sequence[str] | None,
    target: Target,
    profiles: Profiles,
    progress: Callable[[str, int, int], None],
    stages: Sequence[str] | None = None,
) -> list[Decision]:
    """Compile the graphs that engines run with TensorRT, as far as anything has changed.

    Args:
        folder: the artifacts.
        precisions: which; None is every exported one that TensorRT takes.
        target: see `engines.compile.target`.
        profiles: by name: allowed sizes per dynamic axis, for every stage that has one.
        progress: told (what, step, steps).
        stages: of those that are compiled; None is all.

    Returns:
        For every engine, whether it was built and why.

    Raises:
        ConfigError: a precision that TensorRT does not take.
        ArtifactError, EngineBuildError, DiskSpaceError: as the steps.
    """
    manifest = folders.load(folder)
    chosen = list(precisions or ())
    if not chosen:
        exported = manifest.precisions()
        chosen = [n for n in exported if Precision.of(n).runs_on(target.library)] or exported
    for name in chosen:
        Precision.of(name).require(target.library)
    # Every input is looked up before the first engine is built.
    parts = compiled() if stages is None else stages
    wanted = [manifest.graph(name, part) for name in chosen for part in parts]
    digests = Digests(folder)
    decisions = []
    for graph in wanted:
        what = f"{graph.precision} {graph.stage}"
        lock = f"{files.LOCK}-{target.name}-{graph.precision}-{graph.stage}"
        waiting = functools.partial(progress, f"waiting for another build of {what}", 0, 1)
        with files.locked(folder, lock, waiting=waiting):
            reasons = _update_engine(folder, graph, target, profiles, digests, progress)
        decisions.append(Decision(what, reasons))
    digests.save()
    return decisions


def engine_decisions(
    folder: Path, precision: str, target: Target, profiles: Profiles, stages: Sequence[str]
) -> list[Decision]:
    """What `build_artifacts` would do with these stages in a precision; nothing is built."""
    digests, decisions = Digests(folder), []
    manifest = folders.load(folder)
    for name in stages:
        graph = manifest.graph(precision, name)
        made_from = _ingredients(graph, target, profiles)
        old = manifest.engine(precision, name, target.name)
        reasons = _engine_reasons(folder, old, made_from, digests)
        decisions.append(Decision(f"{precision} {name}", reasons))
    return decisions


def _ingredients(graph: GraphEntry, target: Target, profiles: Profiles) -> dict[str, str]:
    ranges = profiles if stage(graph.stage).dynamic else {}
    return ingredients.engine_ingredients(graph.graph.sha256, graph.data.sha256, target, ranges)


def _update_engine(
    folder: Path,
    graph: GraphEntry,
    target: Target,
    profiles: Profiles,
    digests: Digests,
    progress: Callable[[str, int, int], None],
) -> tuple[str, ...]:
    """Build an engine if anything has changed, and commit it; what that was."""
    with folders.reading(folder) as manifest:  # it may be newer than `graph`
        graph = manifest.graph(graph.precision, graph.stage)
        ranges = profiles if stage(graph.stage).dynamic else {}
        made_from = _ingredients(graph, target, profiles)
        old = manifest.engine(graph.precision, graph.stage, target.name)
        if not (reasons := _engine_reasons(folder, old, made_from, digests)):
            return ()
        what = f"{graph.precision} {graph.stage}"
        kept = f"engines/{graph.precision}/{target.name}/"
        files.require_space(folder / kept / f"{graph.stage}.engine", int(1.1 * graph.data.bytes))
        built = target.build(
            graph.verified(folder),
            stage(graph.stage),
            manifest.config,
            ranges,
            lambda phase, step, steps: progress(f"{what}: {phase}", step, steps),
        )
    with files.staging_folder(folder) as staging:
        path = staging / "engine" / f"{graph.stage}.engine"
        with files.disk_errors(folder / kept / path.name):
            path.parent.mkdir()
            path.write_bytes(built.plan)
        files.sync_folder(path.parent)
        file = FileEntry.of(path.parent, path)
        with folders.updated(folder) as manifest:
            place = folders.place(kept, graph.stage, made_from)
            entry = EngineEntry(
                stage=graph.stage,
                precision=graph.precision,
                target=target.name,
                engine=file.under(files.publish_new(path.parent, folder, place)),
                made_from=made_from,
                sms=built.sms,
                refused=built.refused,
                profiles={name: dict(axes) for name, axes in ranges.items()},
                builder=built.builder,
                seconds=round(built.seconds, 2),
            )
            manifest.put_engine(entry)
            # No build would ever replace an engine of a stage that is compiled no more.
            manifest.engines = [e for e in manifest.engines if e.stage in compiled()]
            digests.note(folder / entry.engine.path, file.sha256)
    return reasons


def _engine_reasons(
    folder: Path, entry: EngineEntry | None, made_from: Mapping[str, str], digests: Digests
) -> tuple[str, ...]:
    """Why an engine must be built; empty if what is there is what would come out."""
    if entry is None:
        return ("not built yet",)
    if changed := ingredients.changes(entry.made_from, made_from):
        return changed
    if not digests.is_same(folder / entry.engine.path, entry.engine.sha256):
        return (f"{entry.engine.path} is not the file that was made",)
    return ()
