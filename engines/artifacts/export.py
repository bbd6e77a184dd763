"""Filling an artifacts folder with the graphs of a checkpoint.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together
with the manifest that speaks of it (`engines.artifacts.folder`), so that a process that dies at any
moment leaves the old artifact or the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts import manifest as manifests
from engines.artifacts.digests import file_digest, text_digest
from engines.artifacts.ingredients import Decision, Ingredients, latest, stale
from engines.artifacts.jobs import Job, Told, run_jobs
from engines.artifacts.manifest import FileEntry, GraphEntry, Manifest
from engines.memory import job_memory, workers_for
from export.precision import Precision
from export.stages import components, stages_of
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.errors import ArtifactError, CheckpointError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = (*ingredients.GRAPH_TOOLS, *ingredients.ENGINE_TOOLS, *ingredients.PROOF_TOOLS)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A component that shall be there in a precision, and all that its graphs depend on."""

    precision: str
    component: str
    made_from: Ingredients

    def __str__(self) -> str:
        return f"{self.precision} {self.component}"


class Export:
    """A checkpoint's components in some precisions, and the folder for them; workers get a copy.

    Args:
        checkpoint: the checkpoint folder.
        folder: the artifacts.
        precisions: which.
        workers: at most so many components at a time, each in a process of its own; default: as
            many as cores and memory allow, or one at a time for a small checkpoint.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the checkpoint is not usable, or there is no
            such precision.
        ArtifactError: the folder is not one of ours.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, precisions: Sequence[str], workers: int | None = None
    ) -> None:
        folders.require_ours(folder)
        self.checkpoint, self.folder = checkpoint, folder
        self.origin = self.digest, self.config = folders.origin_of(checkpoint)
        self.tokenizer = checkpoints.read_tokenizer(checkpoint)
        if self.tokenizer is not None:
            tokenizers.parse(self.tokenizer, self.config)  # refused before the long work
        origin = ingredients.origin_ingredients(*self.origin)
        # This is looked up before the code in question is imported, so that an edit during a long
        # export is not taken for what was exported.
        self.wanted = [
            Wanted(name, part, ingredients.graph_ingredients(part, name, origin))
            for name in dict.fromkeys(precisions)
            for part in components()
        ]
        self.workers = workers_for(checkpoint) if workers is None else workers
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, progress: Told) -> list[Decision]:
        """Export what has changed; what is finished stays usable if the rest fails.

        Returns:
            For every component and precision, whether it was exported and why.

        Raises:
            ExportError, CheckpointError, DiskSpaceError: as the steps.
            ArtifactError: the folder is given to another checkpoint meanwhile.
        """
        try:
            decisions, jobs = self.begin(progress)
            made = run_jobs(jobs, progress, workers=self.workers)
            return latest([*decisions, *itertools.chain.from_iterable(made.values())])
        finally:
            _model.cache_clear()

    def begin(self, progress: Told) -> tuple[list[Decision], list[Job]]:
        """A Decision on every component, and jobs that export what must be and decide again.

        Where the folder holds another checkpoint's graphs, or an older version's, all are exported
        here: the old ones stay until all new ones are there, and go at one moment. See `run`.
        """
        if self._foreign():
            waiting = functools.partial(progress, f"waiting for another export into {self.folder}")
            with files.locked(self.folder, f"{files.LOCK}-exports", waiting=waiting):
                if reasons := self._foreign():  # still
                    self._replace(progress)
                    return [Decision(str(item), reasons) for item in self.wanted], []
        if not self._has_tokenizer(folders.find(self.folder)):
            with (
                files.staging_folder(self.folder) as staging,
                folders.updated(self.folder, self._begun) as manifest,
            ):
                self._put_tokenizer(staging, manifest)
        manifest = self._require_ours(folders.find(self.folder))
        decisions = [Decision(str(item), self._reasons(manifest, item)) for item in self.wanted]
        changed = {decision.what for decision in decisions if decision.reasons}
        wanted = [item for item in self.wanted if str(item) in changed]
        return decisions, self._jobs(wanted, self._update)

    def _foreign(self) -> tuple[str, ...]:
        """Why everything is made anew, to take the old files' place at one moment; else nothing."""
        if folders.is_older(self.folder):
            return ("made by an older version",)
        old = folders.find(self.folder)
        if old is None or not old.graphs:
            return ()
        before = ingredients.origin_ingredients(*old.origin)
        return ingredients.changes(before, ingredients.origin_ingredients(*self.origin))

    def _replace(self, progress: Told) -> None:
        """Export everything beside the old files, then let the manifest speak of the new ones."""
        old = folders.find(self.folder)
        progress(f"in place of the artifacts of {old.name if old else 'an older version'}")
        begun = functools.partial(self._begun, replaced=old)
        with files.staging_folder(self.folder) as staging:
            jobs = self._jobs(self.wanted, functools.partial(self._export, staging))
            made = run_jobs(jobs, progress, workers=self.workers)
            with folders.updated(self.folder, begun) as manifest:
                self._put_tokenizer(staging, manifest)
                for item in self.wanted:
                    self._put(staging, item, made[f"export {item}"], manifest)
        for name in (manifests.PARITY, manifests.QUALITY):
            (self.folder / name).unlink(missing_ok=True)

    def _begun(self, present: Manifest | None, replaced: Manifest | None = None) -> Manifest:
        """The manifest to add to: the present one, or a new one in place of `replaced`."""
        if present and present.graphs and not (replaced and present.origin == replaced.origin):
            return self._require_ours(present)
        if present and present.origin == self.origin:
            return present
        return Manifest(self.checkpoint.resolve().name, *self.origin)

    def _require_ours(self, manifest: Manifest | None) -> Manifest:
        """The manifest to add to; two checkpoints are not mixed in one folder.

        Raises:
            ArtifactError: the artifacts are another one's, or gone.
        """
        if manifest is None:
            raise ArtifactError("the artifacts were removed during the export")
        if manifest.origin != self.origin:
            raise ArtifactError(
                "the folder was given to another checkpoint during the export",
                expected=f"weights {self.digest}",
                got=f"weights {manifest.checkpoint}",
                remedy="export into a folder of its own",
            )
        return manifest

    def _jobs(self, items: Iterable[Wanted], run: Callable[[Wanted, Told], Any]) -> list[Job]:
        """A job for each component, the largest first."""
        jobs = []
        for item in items:
            memory = job_memory("export", self.checkpoint, item.component)
            jobs.append(Job(f"export {item}", functools.partial(run, item), memory))
        return sorted(jobs, key=lambda job: -job.memory)

    def _reasons(self, manifest: Manifest, item: Wanted) -> tuple[str, ...]:
        """Why a component must be exported; empty if what is there is what would come out."""
        graphs = [manifest.find_graph(item.precision, s.name) for s in stages_of(item.component)]
        return stale(graphs, "not exported yet", self.folder, item.made_from)

    def _update(self, item: Wanted, report: Told) -> list[Decision]:
        """Export a component if another process has not, and commit it."""
        lock = f"{files.LOCK}-{item.precision}-{item.component}"
        waiting = functools.partial(report, "waiting for another export of it")
        with files.locked(self.folder, lock, waiting=waiting):
            reasons = self._reasons(self._require_ours(folders.find(self.folder)), item)
            if reasons:
                with files.staging_folder(self.folder) as staging:
                    entries = self._export(staging, item, report)
                    with folders.updated(self.folder, self._require_ours) as manifest:
                        self._put(staging, item, entries, manifest)
        return [Decision(str(item), reasons)]

    def _export(self, staging: Path, item: Wanted, report: Told) -> list[GraphEntry]:
        """Export into a folder of its own in `staging`; the paths are below that one."""
        from export.exporter import export_stage

        report("reading the checkpoint")
        model = _model(self.checkpoint, self.digest)
        report("exporting")
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
        """Move what was exported to its place, and let the manifest speak of it."""
        wanted = folders.place(f"onnx/{item.precision}/", item.component, item.made_from)
        place = files.publish_new(staging / str(item), self.folder, wanted)
        rules = Precision.of(item.precision).rules
        manifest.policies[item.precision] = [dataclasses.asdict(rule) for rule in rules]
        manifest.tools.update(ingredients.tool_versions(TOOLS))
        for entry in entries:
            graph, data = entry.graph.under(place), entry.data.under(place)
            manifest.put_graph(dataclasses.replace(entry, graph=graph, data=data))

    def _has_tokenizer(self, manifest: Manifest | None) -> bool:
        """Whether the artifacts are this checkpoint's, with its present tokenizer or none."""
        if manifest is None or manifest.origin != self.origin:
            return False
        entry = manifest.tokenizer
        if entry is None or self.tokenizer is None:
            return entry is None and self.tokenizer is None
        return entry.sha256 == text_digest(self.tokenizer) and entry.is_kept(self.folder)

    def _put_tokenizer(self, staging: Path, manifest: Manifest) -> None:
        """Let the manifest speak of the checkpoint's tokenizer, moved to its place, or of none."""
        if self._has_tokenizer(manifest):
            return
        manifest.tokenizer = None
        if self.tokenizer is not None:
            path = staging / "tokenizer" / manifests.TOKENIZER
            path.parent.mkdir()
            path.write_text(self.tokenizer, "utf-8")
            files.sync_folder(path.parent)
            file = FileEntry.of(path.parent, path)
            wanted = folders.place("", "tokenizer", {"sha256": file.sha256})
            place = files.publish_new(path.parent, self.folder, wanted)
            manifest.tokenizer = file.under(place)


@functools.lru_cache(maxsize=1)
def _model(checkpoint: Path, digest: str) -> LDLM:
    """The model, if its file is still the one that was looked at; kept during an export.

    Raises:
        CheckpointError: it has been replaced meanwhile.
    """
    from ldlm.model import LDLM

    model = LDLM.from_checkpoint(checkpoint)
    found = file_digest(checkpoint / checkpoints.WEIGHTS)
    if found != digest:
        raise CheckpointError(
            f"{checkpoint} was replaced during the export",
            expected=f"sha256 {digest}",
            got=f"sha256 {found}",
            remedy="export again",
        )
    return model
