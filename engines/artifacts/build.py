"""Engines from the graphs of an artifacts folder, as far as anything has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts.digests import Digests
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import EngineEntry, FileEntry, GraphEntry, Manifest
from engines.compile.target import Target
from engines.tensorrt.profiles import Profiles
from export.precision import Precision
from export.stages import compiled, stage
from ldlm import files
from ldlm.errors import ArtifactError


def build_artifacts(
    folder: Path,
    precisions: Sequence[str] | None,
    target: Target,
    profiles: Profiles,
    progress: Callable[[str, int, int], None],
) -> list[Decision]:
    """Compile the graphs that engines run with TensorRT, as far as anything has changed.

    Args:
        folder: the artifacts.
        precisions: which; None is every exported one that TensorRT takes.
        target: see `engines.compile.target`.
        profiles: by name: allowed sizes per dynamic axis, for every stage that has one.
        progress: told (what, step, steps).

    Returns:
        For every engine, whether it was built and why.

    Raises:
        ConfigError: a precision that TensorRT does not take.
        ArtifactError, EngineBuildError, DiskSpaceError: as the steps.
    """
    manifest = folders.load(folder)
    exported = manifest.precisions()
    library = target.library
    takes = [name for name in exported if Precision.of(name).runs_on(library)]
    chosen = precisions or takes or exported
    for name in chosen:
        Precision.of(name).require(library)
    # Every input is looked up before the first engine is built.
    wanted = [manifest.graph(name, stage) for name in chosen for stage in compiled()]
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


def _update_engine(
    folder: Path,
    graph: GraphEntry,
    target: Target,
    profiles: Profiles,
    digests: Digests,
    progress: Callable[[str, int, int], None],
) -> tuple[str, ...]:
    """Build an engine if anything has changed; what that was."""
    manifest = folders.load(folder)  # it may be newer than `graph`
    graph = manifest.graph(graph.precision, graph.stage)
    if not stage(graph.stage).dynamic:
        profiles = {}
    made_from = ingredients.engine_ingredients(
        graph.graph.sha256, graph.data.sha256, target, profiles
    )
    entry = manifest.engine(graph.precision, graph.stage, target.name)
    reasons = _engine_reasons(folder, entry, made_from, digests)
    if reasons:
        file = _build(folder, manifest, graph, target, profiles, made_from, progress)
        digests.note(folder / file.path, file.sha256)
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


def _build(
    folder: Path,
    manifest: Manifest,
    graph: GraphEntry,
    target: Target,
    profiles: Profiles,
    made_from: dict[str, str],
    progress: Callable[[str, int, int], None],
) -> FileEntry:
    what = f"{graph.precision} {graph.stage}"
    place = Path("engines", graph.precision, target.name, f"{graph.stage}.engine")
    files.require_space(folder / place, int(1.1 * graph.data.bytes))
    built = target.build(
        graph.verified(folder),
        stage(graph.stage),
        manifest.config,
        profiles,
        lambda phase, step, steps: progress(f"{what}: {phase}", step, steps),
    )
    with files.staging_folder(folder) as staging:
        path = staging / place
        with files.disk_errors(folder / place):
            path.parent.mkdir(parents=True)
            path.write_bytes(built.plan)
        entry = EngineEntry(
            stage=graph.stage,
            precision=graph.precision,
            target=target.name,
            engine=FileEntry.of(staging, path),
            made_from=made_from,
            sms=built.sms,
            refused=built.refused,
            profiles={name: dict(axes) for name, axes in profiles.items()},
            builder=built.builder,
            seconds=round(built.seconds, 2),
        )
        folders.commit(folder, staging, lambda present: _with_engine(folder, present, entry))
    return entry.engine


def _with_engine(folder: Path, manifest: Manifest | None, entry: EngineEntry) -> Manifest:
    if manifest is None:
        raise ArtifactError("the artifacts were removed while an engine was built", got=folder)
    manifest.put_engine(entry)
    # No build would ever replace an engine of a stage that is compiled no more.
    manifest.engines = [e for e in manifest.engines if e.stage in compiled()]
    return manifest
