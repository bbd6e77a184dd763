"""Filling an artifacts folder with the graphs of a checkpoint.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together
with the manifest that speaks of it (`engines.artifacts.folder`), so that a process that dies at any
moment leaves the old artifact or the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts import manifest as manifests
from engines.artifacts.digests import Digests, text_digest
from engines.artifacts.folder import require_ours
from engines.artifacts.ingredients import Decision
from engines.artifacts.jobs import DONE, Job, Report, run_jobs
from engines.artifacts.manifest import FileEntry, GraphEntry, Manifest
from engines.artifacts.source import Source, Wanted
from export.precision import Precision
from export.stages import components, stages_of
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, CheckpointError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = dict.fromkeys(
    [*ingredients.GRAPH_TOOLS, *ingredients.ENGINE_TOOLS, *ingredients.PROOF_TOOLS]
)
WORTH_WORKERS = 100_000_000  # bytes of a checkpoint, see `export_artifacts`
Progress = Callable[[str], None]
Run = Callable[[Mapping[str, tuple["Wanted", Callable[[Report], Any]]]], dict[str, Any]]


def export_artifacts(
    checkpoint: Path,
    folder: Path,
    precisions: Sequence[str],
    progress: Progress,
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
    require_ours(folder)
    digests = Digests(folder)
    source = Source.of(checkpoint, digests)
    wanted = [Wanted.of(source, name, weights) for name in precisions for weights in components()]
    folder.mkdir(parents=True, exist_ok=True)
    run = functools.partial(_run, source, progress, workers)
    try:
        if _replaces(folder, source):
            waiting = functools.partial(progress, f"waiting for another export into {folder}")
            with files.locked(folder, f"{files.LOCK}-exports", waiting=waiting):
                if reasons := _replaces(folder, source):  # still
                    _replace(folder, source, wanted, digests, run, progress)
                    return [Decision(str(item), reasons) for item in wanted]
        _begin(folder, source, digests)
        decisions, work = _pending(folder, source, wanted, digests)
        return list((decisions | (run(work) if work else {})).values())
    finally:
        _model.cache_clear()
        digests.save()


def export_jobs(
    checkpoint: Path, folder: Path, precisions: Sequence[str]
) -> tuple[dict[str, Decision], dict[str, Job]] | None:
    """What is up to date, and a job for each graph that is not; both by "precision component".

    A job commits its graph, and returns its Decision.

    Returns:
        None where the folder is another checkpoint's: `export_artifacts` replaces that as a whole.

    Raises:
        CheckpointError, ConfigError, ArtifactError: as `export_artifacts`.
    """
    require_ours(folder)
    digests = Digests(folder)
    source = Source.of(checkpoint, digests)
    wanted = [Wanted.of(source, name, part) for name in precisions for part in components()]
    folder.mkdir(parents=True, exist_ok=True)
    if _replaces(folder, source):
        return None
    _begin(folder, source, digests)
    decisions, work = _pending(folder, source, wanted, digests)
    jobs = {n: Job(f"export {n}", run, item.memory(source)) for n, (item, run) in work.items()}
    return decisions, jobs


def _run(
    source: Source,
    progress: Progress,
    workers: int | None,
    work: Mapping[str, tuple[Wanted, Callable[[Report], Any]]],
) -> dict[str, Any]:
    """Run a function for each graph, the largest first, side by side where that pays."""
    workers = workers_for(source.folder) if workers is None else workers
    jobs = [Job(name, run, item.memory(source)) for name, (item, run) in work.items()]
    jobs.sort(key=lambda job: -job.memory)
    return run_jobs(jobs, told(progress, len(jobs)), workers=workers)


def workers_for(checkpoint: Path) -> int | None:
    """1 for a checkpoint so small that starting workers takes longer than they save."""
    return 1 if (checkpoint / checkpoints.WEIGHTS).stat().st_size < WORTH_WORKERS else None


def told(progress: Progress, count: int) -> Callable[[str, str, int, int], None]:
    """Say in one line what runs, how much is done, and how long the rest may take."""
    running: dict[str, str] = {}
    done: list[str] = []
    began = time.monotonic()

    def tell(name: str, phase: str, _step: int, _steps: int) -> None:
        running[name] = phase
        if phase == DONE:
            done.append(running.pop(name))
        text = "; ".join(f"{job}: {what}" for job, what in running.items())
        if done and running:
            left = (time.monotonic() - began) / len(done) * (count - len(done))
            text += f" ({len(done)} of {count}, about {left:.0f} s left)"
        if text:
            progress(text)

    return tell


def _replaces(folder: Path, source: Source) -> tuple[str, ...]:
    """Why everything is made anew, to take the old files' place at one moment; else nothing."""
    if folders.is_older(folder):
        return ("made by an older version",)
    old = folders.find(folder)
    if old is None or not old.graphs or source.is_of(old):
        return ()
    return ingredients.changes(
        {"weights": old.checkpoint, "config": text_digest(old.config.to_json())},
        {"weights": source.digest, "config": text_digest(source.config.to_json())},
    )


def _replace(
    folder: Path,
    source: Source,
    wanted: Sequence[Wanted],
    digests: Digests,
    run: Run,
    progress: Progress,
) -> None:
    """Export everything beside the old files, then let the manifest speak of the new ones."""
    old = folders.find(folder)
    progress(f"in place of the artifacts of {old.name if old else 'an older version'}")

    def begin(present: Manifest | None) -> Manifest:
        if present is not None and present.graphs and _origin(present) != _origin(old):
            source.require_of(present)
        return source.fresh()

    with files.staging_folder(folder) as staging:
        tokenizer = source.stage_tokenizer(staging)
        made = run({
            str(item): (item, functools.partial(_export, folder, source, item, staging))
            for item in wanted
        })  # fmt: skip
        with folders.updated(folder, begin) as manifest:
            _put_tokenizer(folder, staging, tokenizer, manifest, digests)
            for item in wanted:
                _put(folder, staging, item, made[str(item)], manifest, digests)
    for name in (manifests.PARITY, manifests.QUALITY):
        (folder / name).unlink(missing_ok=True)


def _origin(manifest: Manifest | None) -> tuple[str, LDLMConfig] | None:
    return (manifest.checkpoint, manifest.config) if manifest is not None else None


def _begin(folder: Path, source: Source, digests: Digests) -> None:
    """A manifest to add to, and the checkpoint's present tokenizer."""

    def begin(present: Manifest | None) -> Manifest:
        if present is not None and present.graphs:
            source.require_of(present)
        return present if present is not None and source.is_of(present) else source.fresh()

    with files.locked(folder, f"{files.LOCK}-tokenizer"):
        manifest = folders.find(folder)
        if manifest is not None and source.is_of(manifest):
            entry = manifest.tokenizer
            digest = None if source.tokenizer is None else text_digest(source.tokenizer)
            if (entry.sha256 if entry else None) == digest and (
                entry is None or digests.is_same(folder / entry.path, entry.sha256)
            ):
                return
        with files.staging_folder(folder) as staging:
            tokenizer = source.stage_tokenizer(staging)
            with folders.updated(folder, begin) as manifest:
                _put_tokenizer(folder, staging, tokenizer, manifest, digests)


def _pending(
    folder: Path, source: Source, wanted: Sequence[Wanted], digests: Digests
) -> tuple[dict[str, Decision], dict[str, tuple[Wanted, Callable[[Report], Any]]]]:
    """A Decision on every graph, and what exports and commits those that have changed."""
    manifest = _ours(source, folders.find(folder))
    decisions = {
        str(item): Decision(str(item), _graph_reasons(manifest, folder, item, digests))
        for item in wanted
    }
    digests.save()  # workers read what is known
    work: dict[str, tuple[Wanted, Callable[[Report], Any]]] = {
        str(item): (item, functools.partial(_update, folder, source, item))
        for item in wanted
        if decisions[str(item)].reasons
    }
    return decisions, work


def _ours(source: Source, present: Manifest | None) -> Manifest:
    """The manifest to add to, if it still is this checkpoint's.

    Raises:
        ArtifactError: it is not.
    """
    if present is None:
        raise ArtifactError("the artifacts were removed during the export")
    source.require_of(present)
    return present


def _update(folder: Path, source: Source, item: Wanted, report: Report) -> Decision:
    """Export a graph if another process has not, and commit it."""
    digests = Digests(folder)
    ours = functools.partial(_ours, source)
    lock = f"{files.LOCK}-{item.precision}-{item.weights}"
    waiting = functools.partial(report, "waiting for another export of it", 0, 1)
    with files.locked(folder, lock, waiting=waiting):
        reasons = _graph_reasons(ours(folders.find(folder)), folder, item, digests)
        if reasons:
            with files.staging_folder(folder) as staging:
                entries = _export(folder, source, item, staging, report)
                with folders.updated(folder, ours) as manifest:
                    _put(folder, staging, item, entries, manifest, digests)
                digests.save()
    return Decision(str(item), reasons)


def _graph_reasons(
    manifest: Manifest, folder: Path, wanted: Wanted, digests: Digests
) -> tuple[str, ...]:
    """Why a graph must be exported; empty if what is there is what would come out."""
    for spec in stages_of(wanted.weights):
        entry = manifest.find_graph(wanted.precision, spec.name)
        if entry is None:
            return ("not exported yet",)
        if changed := ingredients.changes(entry.made_from, wanted.made_from):
            return changed
        for file in (entry.graph, entry.data):
            if not digests.is_same(folder / file.path, file.sha256):
                return (f"{file.path} is not the file that was made",)
    return ()


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


def _export(
    folder: Path, source: Source, item: Wanted, staging: Path, report: Report
) -> list[GraphEntry]:
    """Export a graph into a folder of its own in `staging`; the paths are below that one."""
    from export.exporter import export_stage

    report("reading the checkpoint", 0, 1)
    model = _model(folder, source)
    report("exporting", 0, 1)
    started = time.perf_counter()
    made = staging / str(item)
    graphs = export_stage(model, item.weights, item.precision, made)
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
    folder: Path,
    staging: Path,
    item: Wanted,
    entries: Sequence[GraphEntry],
    manifest: Manifest,
    digests: Digests,
) -> None:
    """Move a graph that was exported to its place, and let the manifest speak of it."""
    wanted = folders.place(f"onnx/{item.precision}/", item.weights, item.made_from)
    place = files.publish_new(staging / str(item), folder, wanted)
    manifest.policies[item.precision] = [
        dataclasses.asdict(rule) for rule in Precision.of(item.precision).rules
    ]
    manifest.tools.update(ingredients.tool_versions(TOOLS))
    for entry in entries:
        graph, data = entry.graph.under(place), entry.data.under(place)
        manifest.put_graph(dataclasses.replace(entry, graph=graph, data=data))
        for file in (graph, data):
            digests.note(folder / file.path, file.sha256)


def _put_tokenizer(
    folder: Path, staging: Path, tokenizer: FileEntry | None, manifest: Manifest, digests: Digests
) -> None:
    """Move a staged tokenizer to its place, and let the manifest speak of it, or of none."""
    manifest.tokenizer = tokenizer
    if tokenizer is not None:
        wanted = folders.place("", "tokenizer", {"sha256": tokenizer.sha256})
        place = files.publish_new(staging / "tokenizer", folder, wanted)
        manifest.tokenizer = tokenizer.under(place)
        digests.note(folder / manifest.tokenizer.path, tokenizer.sha256)
