"""Filling an artifacts folder with the graphs of a checkpoint.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together
with the manifest that speaks of it (`engines.artifacts.folder`), so that a process that dies at any
moment leaves the old artifact or the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts import manifest as manifests
from engines.artifacts.digests import Digests, text_digest
from engines.artifacts.ingredients import Decision, stale
from engines.artifacts.jobs import Job, Report, Told, run_told
from engines.artifacts.manifest import FileEntry, GraphEntry, Manifest
from engines.artifacts.source import Source, Wanted, workers_for
from export.precision import Precision
from export.stages import components, stages_of
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm.errors import CheckpointError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = (*ingredients.GRAPH_TOOLS, *ingredients.ENGINE_TOOLS, *ingredients.PROOF_TOOLS)


def export_artifacts(
    checkpoint: Path,
    folder: Path,
    precisions: Sequence[str],
    progress: Told,
    *,
    workers: int | None = None,
) -> list[Decision]:
    """Export every stage of a checkpoint in every precision, as far as it has changed.

    What is finished stays usable if the rest fails. Where the folder holds another checkpoint's
    graphs, or an older version's, those stay until all new ones are there, and go at one moment.

    Args:
        checkpoint: the checkpoint folder.
        folder: the artifacts.
        precisions: which.
        progress: told what is being done.
        workers: at most so many graphs at a time, each in a process of its own; default: as many
            as cores and memory allow, or one at a time for a small checkpoint.

    Returns:
        For every stage and precision, whether it was exported and why.

    Raises:
        ConfigError, CheckpointError, ExportError, DiskSpaceError: as the steps; ArtifactError when
            the folder is not one of ours, or is given to another checkpoint meanwhile.
    """
    export = Export(checkpoint, folder, precisions)
    workers = workers_for(checkpoint) if workers is None else workers
    try:
        if export.replaces():
            waiting = functools.partial(progress, f"waiting for another export into {folder}")
            with files.locked(folder, f"{files.LOCK}-exports", waiting=waiting):
                if reasons := export.replaces():  # still
                    export.replace(progress, workers)
                    return [Decision(str(item), reasons) for item in export.wanted]
        decisions, jobs = export.pending()
        return list((decisions | run_told(jobs.values(), progress, workers)).values())
    finally:
        _model.cache_clear()
        export.digests.save()


class Export:
    """A checkpoint, the folder that its graphs go to, and which; workers get a copy.

    Raises:
        CheckpointError, ConfigError, ArtifactError: as `export_artifacts`.
    """

    def __init__(self, checkpoint: Path, folder: Path, precisions: Sequence[str]) -> None:
        folders.require_ours(folder)
        self.folder, self.digests = folder, Digests(folder)
        self.source = Source.of(checkpoint, self.digests)
        self.wanted = [
            Wanted.of(self.source, name, part) for name in precisions for part in components()
        ]
        folder.mkdir(parents=True, exist_ok=True)

    def replaces(self) -> tuple[str, ...]:
        """Why everything is made anew, to take the old files' place at one moment; else nothing."""
        if folders.is_older(self.folder):
            return ("made by an older version",)
        old = folders.find(self.folder)
        if old is None or not old.graphs or self.source.is_of(old):
            return ()
        return ingredients.changes(
            *(
                {"weights": weights, "config": text_digest(config.to_json())}
                for weights, config in (old.origin, self.source.origin)
            )
        )

    def replace(self, progress: Told, workers: int | None) -> None:
        """Export everything beside the old files, then let the manifest speak of the new ones."""
        old = folders.find(self.folder)
        progress(f"in place of the artifacts of {old.name if old else 'an older version'}")

        def begin(present: Manifest | None) -> Manifest:
            if present and present.graphs and not (old and present.origin == old.origin):
                self.source.require_of(present)
            return self.source.fresh()

        with files.staging_folder(self.folder) as staging:
            tokenizer = self.source.stage_tokenizer(staging)
            jobs = self._jobs(self.wanted, self._export, staging)
            made = run_told(jobs.values(), progress, workers)
            with folders.updated(self.folder, begin) as manifest:
                self._put_tokenizer(staging, tokenizer, manifest)
                for item in self.wanted:
                    self._put(staging, item, made[str(item)], manifest)
        for name in (manifests.PARITY, manifests.QUALITY):
            (self.folder / name).unlink(missing_ok=True)

    def pending(self) -> tuple[dict[str, Decision], dict[str, Job]]:
        """A Decision on every graph; for each that has changed, a job that commits it.

        Both by "precision component". A job returns its Decision.
        """
        self._begin()
        manifest = self.source.require_of(folders.find(self.folder))
        decisions = {
            str(item): Decision(str(item), self._reasons(manifest, item)) for item in self.wanted
        }
        self.digests.save()
        changed = [item for item in self.wanted if decisions[str(item)].reasons]
        return decisions, self._jobs(changed, self._update)

    def _jobs(
        self, items: Iterable[Wanted], run: Callable[..., Any], *arguments: Any
    ) -> dict[str, Job]:
        """A job for each graph, the largest first."""
        jobs = [
            Job(str(item), functools.partial(run, item, *arguments), item.memory(self.source))
            for item in items
        ]
        return {job.name: job for job in sorted(jobs, key=lambda job: -job.memory)}

    def _begin(self) -> None:
        """A manifest to add to, and the checkpoint's present tokenizer."""

        def begin(present: Manifest | None) -> Manifest:
            if present and present.graphs:
                self.source.require_of(present)
            return present if present and self.source.is_of(present) else self.source.fresh()

        with files.locked(self.folder, f"{files.LOCK}-tokenizer"):
            manifest = folders.find(self.folder)
            if manifest and self.source.is_of(manifest):
                text, entry = self.source.tokenizer, manifest.tokenizer
                digest = None if text is None else text_digest(text)
                if (entry.sha256 if entry else None) == digest and (
                    entry is None or self.digests.is_same(self.folder / entry.path, entry.sha256)
                ):
                    return
            with files.staging_folder(self.folder) as staging:
                tokenizer = self.source.stage_tokenizer(staging)
                with folders.updated(self.folder, begin) as manifest:
                    self._put_tokenizer(staging, tokenizer, manifest)

    def _reasons(self, manifest: Manifest, item: Wanted) -> tuple[str, ...]:
        """Why a graph must be exported; empty if what is there is what would come out."""
        graphs = (manifest.find_graph(item.precision, s.name) for s in stages_of(item.component))
        args = (self.folder, item.made_from, self.digests)
        found = (stale(graph, "not exported yet", *args) for graph in graphs)
        return next(filter(None, found), ())

    def _update(self, item: Wanted, report: Report) -> Decision:
        """Export a graph if another process has not, and commit it."""
        ours = self.source.require_of
        lock = f"{files.LOCK}-{item.precision}-{item.component}"
        waiting = functools.partial(report, "waiting for another export of it", 0, 1)
        with files.locked(self.folder, lock, waiting=waiting):
            reasons = self._reasons(ours(folders.find(self.folder)), item)
            if reasons:
                with files.staging_folder(self.folder) as staging:
                    entries = self._export(item, staging, report)
                    with folders.updated(self.folder, ours) as manifest:
                        self._put(staging, item, entries, manifest)
                    self.digests.save()
        return Decision(str(item), reasons)

    def _export(self, item: Wanted, staging: Path, report: Report) -> list[GraphEntry]:
        """Export a graph into a folder of its own in `staging`; the paths are below that one."""
        from export.exporter import export_stage

        report("reading the checkpoint", 0, 1)
        model = _model(self.folder, self.source)
        report("exporting", 0, 1)
        started = time.perf_counter()
        made = staging / str(item)
        graphs = export_stage(model, item.component, item.precision, made)
        files.sync_folder(made)
        seconds = round(time.perf_counter() - started, 2)
        return [
            GraphEntry(
                stage=graph.spec.name,
                precision=item.precision,
                graph=FileEntry.of(made, graph.path),
                data=FileEntry.of(made, graph.data),
                made_from=item.made_from,
                seconds=seconds,
                evidence=dict(graph.evidence),
            )
            for graph in graphs
        ]

    def _put(
        self, staging: Path, item: Wanted, entries: Sequence[GraphEntry], manifest: Manifest
    ) -> None:
        """Move a graph that was exported to its place, and let the manifest speak of it."""
        wanted = folders.place(f"onnx/{item.precision}/", item.component, item.made_from)
        place = files.publish_new(staging / str(item), self.folder, wanted)
        rules = Precision.of(item.precision).rules
        manifest.policies[item.precision] = [dataclasses.asdict(rule) for rule in rules]
        manifest.tools.update(ingredients.tool_versions(TOOLS))
        for entry in entries:
            graph, data = entry.graph.under(place), entry.data.under(place)
            manifest.put_graph(dataclasses.replace(entry, graph=graph, data=data))
            for file in (graph, data):
                self.digests.note(self.folder / file.path, file.sha256)

    def _put_tokenizer(
        self, staging: Path, tokenizer: FileEntry | None, manifest: Manifest
    ) -> None:
        """Move a staged tokenizer to its place, and let the manifest speak of it, or of none."""
        manifest.tokenizer = tokenizer
        if tokenizer is not None:
            wanted = folders.place("", "tokenizer", {"sha256": tokenizer.sha256})
            place = files.publish_new(staging / "tokenizer", self.folder, wanted)
            manifest.tokenizer = tokenizer.under(place)
            self.digests.note(self.folder / manifest.tokenizer.path, tokenizer.sha256)


@functools.lru_cache(maxsize=1)
def _model(folder: Path, source: Source) -> LDLM:
    """The model, if its file is still the one that was looked at; kept during an export.

    Raises:
        CheckpointError: it has been replaced meanwhile.
    """
    from ldlm.model import LDLM

    model = LDLM.from_checkpoint(source.folder)
    found = Digests(folder).of(source.folder / checkpoints.WEIGHTS)
    if found != source.digest:
        raise CheckpointError(
            f"{source.folder} was replaced during the export",
            expected=f"sha256 {source.digest}",
            got=f"sha256 {found}",
            remedy="export again",
        )
    return model
