"""Engines from the graphs of an artifacts folder, as far as anything has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts.digests import Digests
from engines.artifacts.ingredients import Decision, stale
from engines.artifacts.manifest import EngineEntry, FileEntry, GraphEntry, Manifest
from engines.compile.target import Target
from engines.tensorrt.profiles import Profiles
from export.precision import Precision
from export.stages import compiled, stage
from ldlm import files

if TYPE_CHECKING:
    from engines.compile.network import BuiltEngine

Progress = Callable[[str, int, int], None]


def build_artifacts(
    folder: Path,
    precisions: Sequence[str] | None,
    target: Target,
    profiles: Profiles,
    progress: Progress,
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
    exported = [] if precisions else manifest.precisions()
    runs = [name for name in exported if Precision.of(name).runs_on(target.library)]
    chosen = precisions or runs or exported
    for name in chosen:
        Precision.of(name).require(target.library)
    # Every input is looked up before the first engine is built.
    parts = compiled() if stages is None else stages
    wanted = [manifest.graph(name, part) for name in chosen for part in parts]
    build = Build(folder, target, profiles)
    decisions = [Decision(f"{g.precision} {g.stage}", build.update(g, progress)) for g in wanted]
    build.digests.save()
    return decisions


class Build:
    """Engines of a folder's graphs, for a target."""

    def __init__(self, folder: Path, target: Target, profiles: Profiles) -> None:
        self.folder, self.target, self.profiles = folder, target, profiles
        self.digests = Digests(folder)

    def decisions(self, precision: str, stages: Sequence[str]) -> list[Decision]:
        """What `build_artifacts` would do with these stages in a precision; nothing is built."""
        manifest = folders.load(self.folder)
        graphs = [manifest.graph(precision, name) for name in stages]
        return [Decision(f"{precision} {g.stage}", self._look(manifest, g)[1]) for g in graphs]

    def _ranges(self, graph: GraphEntry) -> Profiles:
        return self.profiles if stage(graph.stage).dynamic else {}

    def _look(
        self, manifest: Manifest, graph: GraphEntry
    ) -> tuple[ingredients.Ingredients, tuple[str, ...]]:
        """What an engine is made from now, and why it must be built; no reason if it is there."""
        made_from = ingredients.engine_ingredients(
            graph.graph.sha256, graph.data.sha256, self.target, self._ranges(graph)
        )
        old = manifest.engine(graph.precision, graph.stage, self.target.name)
        return made_from, stale(old, "not built yet", self.folder, made_from, self.digests)

    def update(self, graph: GraphEntry, progress: Progress) -> tuple[str, ...]:
        """Build an engine if anything has changed and no other process has; what that was."""
        what = f"{graph.precision} {graph.stage}"
        lock = f"{files.LOCK}-{self.target.name}-{graph.precision}-{graph.stage}"
        waiting = functools.partial(progress, f"waiting for another build of {what}", 0, 1)
        with files.locked(self.folder, lock, waiting=waiting):
            with folders.reading(self.folder) as manifest:  # it may be newer than `graph`
                graph = manifest.graph(graph.precision, graph.stage)
                made_from, reasons = self._look(manifest, graph)
                if not reasons:
                    return ()
                place = self.folder / "engines" / f"{graph.stage}.engine"
                files.require_space(place, int(1.1 * graph.data.bytes))
                built = self.target.build(
                    graph.verified(self.folder),
                    stage(graph.stage),
                    manifest.config,
                    self._ranges(graph),
                    lambda phase, step, steps: progress(f"{what}: {phase}", step, steps),
                )
            self._commit(graph, built, made_from)
        return reasons

    def _commit(self, graph: GraphEntry, built: BuiltEngine, made_from: dict[str, str]) -> None:
        """Let an engine and its entry appear."""
        kept = f"engines/{graph.precision}/{self.target.name}/"
        with files.staging_folder(self.folder) as staging:
            path = staging / "engine" / f"{graph.stage}.engine"
            with files.disk_errors(self.folder / kept / path.name):
                path.parent.mkdir()
                path.write_bytes(built.plan)
            files.sync_folder(path.parent)
            file = FileEntry.of(path.parent, path)
            with folders.updated(self.folder) as manifest:
                place = folders.place(kept, graph.stage, made_from)
                entry = EngineEntry(
                    stage=graph.stage,
                    precision=graph.precision,
                    target=self.target.name,
                    engine=file.under(files.publish_new(path.parent, self.folder, place)),
                    made_from=made_from,
                    sms=built.sms,
                    refused=built.refused,
                    profiles={name: dict(axes) for name, axes in self._ranges(graph).items()},
                    builder=built.builder,
                    seconds=round(built.seconds, 2),
                )
                manifest.put_engine(entry)
                # No build would ever replace an engine of a stage that is compiled no more.
                manifest.engines = [e for e in manifest.engines if e.stage in compiled()]
                self.digests.note(self.folder / entry.engine.path, file.sha256)
