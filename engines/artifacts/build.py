"""Engines from the graphs of an artifacts folder, as far as anything has changed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts.ingredients import Decision, Ingredients, engine_ingredients, stale
from engines.artifacts.manifest import EngineEntry, FileEntry, GraphEntry, Manifest
from engines.compile.network import BuiltEngine, Progress
from engines.compile.target import Target
from engines.tensorrt.profiles import Profiles
from export.precision import Precision
from export.stages import compiled, stage
from ldlm import files


@dataclass(frozen=True)
class Build:
    """The engines that TensorRT compiles from a folder's graphs.

    Attributes:
        folder: the artifacts.
        target: see `engines.compile.target`.
        profiles: by name: allowed sizes per dynamic axis, for every stage that has one.
    """

    folder: Path
    target: Target
    profiles: Profiles

    def run(
        self,
        precisions: Sequence[str] | None,
        progress: Progress,
        stages: Sequence[str] | None = None,
    ) -> list[Decision]:
        """Build what has changed.

        Args:
            precisions: which; None is every exported one that TensorRT takes.
            progress: told (what, step, steps).
            stages: of those that are compiled; None is all.

        Returns:
            For every engine, whether it was built and why.

        Raises:
            ConfigError: a precision that TensorRT does not take.
            ArtifactError, EngineBuildError, DiskSpaceError: as the steps.
        """
        manifest = folders.load(self.folder)
        exported = [] if precisions else manifest.precisions()
        runs = [name for name in exported if Precision.of(name).runs_on(self.target.library)]
        chosen = precisions or runs or exported
        for name in chosen:
            Precision.of(name).require(self.target.library)
        # Every input is looked up before the first engine is built.
        parts = compiled() if stages is None else stages
        wanted = [manifest.graph(name, part) for name in chosen for part in parts]
        return [self._update(graph, progress) for graph in wanted]

    def decisions(self, precision: str, stages: Sequence[str]) -> list[Decision]:
        """What `run` would do with these stages in a precision; nothing is built."""
        manifest = folders.load(self.folder)
        return [self._look(manifest, manifest.graph(precision, name))[1] for name in stages]

    def _ranges(self, graph: GraphEntry) -> Profiles:
        return self.profiles if stage(graph.stage).dynamic else {}

    def _look(self, manifest: Manifest, graph: GraphEntry) -> tuple[Ingredients, Decision]:
        """What an engine is made from now, and whether it must be built."""
        made_from = engine_ingredients(graph, self.target, self._ranges(graph))
        old = manifest.engine(graph.precision, graph.stage, self.target.name)
        reasons = stale([old], "not built yet", self.folder, made_from)
        return made_from, Decision(f"{graph.precision} {graph.stage}", reasons)

    def _update(self, graph: GraphEntry, progress: Progress) -> Decision:
        """Build an engine if anything has changed and no other process has."""
        what = f"{graph.precision} {graph.stage}"
        lock = f"{files.LOCK}-{self.target.name}-{graph.precision}-{graph.stage}"
        waiting = functools.partial(progress, f"waiting for another build of {what}", 0, 1)
        with files.locked(self.folder, lock, waiting=waiting):
            with folders.reading(self.folder) as manifest:  # it may be newer than `graph`
                graph = manifest.graph(graph.precision, graph.stage)
                made_from, decision = self._look(manifest, graph)
                if not decision.reasons:
                    return decision
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
        return decision

    def _commit(self, graph: GraphEntry, built: BuiltEngine, made_from: Ingredients) -> None:
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
