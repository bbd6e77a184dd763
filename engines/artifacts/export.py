"""Filling an artifacts folder with the graphs of a checkpoint.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together
with the manifest that speaks of it (`engines.artifacts.folder`), so that a process that dies at any
moment leaves the old artifact or the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.artifacts import folder as folders
from engines.artifacts import ingredients
from engines.artifacts import manifest as manifests
from engines.artifacts.digests import Digests, text_digest
from engines.artifacts.folder import require_ours
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import FileEntry, GraphEntry, Manifest
from export.precision import Precision
from export.stages import components, stages_of
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, CheckpointError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = dict.fromkeys(
    [*ingredients.GRAPH_TOOLS, *ingredients.ENGINE_TOOLS, *ingredients.PROOF_TOOLS]
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is exported: a checkpoint folder, and what identifies it."""

    folder: Path
    digest: str
    config: LDLMConfig
    tokenizer: str | None

    @classmethod
    def of(cls, checkpoint: Path, digests: Digests) -> Source:
        """Look at a checkpoint without loading it.

        Raises:
            CheckpointError, ConfigError: it is not usable.
        """
        config = checkpoints.read_config(checkpoint)
        checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
        digest = digests.of(checkpoint / checkpoints.WEIGHTS)
        return cls(checkpoint, digest, config, checkpoints.read_tokenizer(checkpoint))

    def is_of(self, manifest: Manifest) -> bool:
        """Whether the artifacts are this checkpoint's."""
        return (manifest.checkpoint, manifest.config) == (self.digest, self.config)

    def require_of(self, manifest: Manifest) -> None:
        """Refuse to mix two checkpoints in one folder.

        Raises:
            ArtifactError: the artifacts are another one's.
        """
        if not self.is_of(manifest):
            raise ArtifactError(
                "the folder was given to another checkpoint during the export",
                expected=f"weights {self.digest}",
                got=f"weights {manifest.checkpoint}",
                remedy="export into a folder of its own",
            )

    def fresh(self) -> Manifest:
        """A manifest without graphs."""
        return Manifest(self.folder.resolve().name, self.digest, self.config)

    def stage_tokenizer(self, staging: Path) -> FileEntry | None:
        """Write tokenizer.json into a folder in `staging`, where there is one.

        Raises:
            TokenizerError: it does not fit the model.
        """
        if self.tokenizer is None:
            return None
        tokenizers.parse(self.tokenizer, self.config)
        path = staging / "tokenizer" / manifests.TOKENIZER
        path.parent.mkdir()
        path.write_text(self.tokenizer, "utf-8")
        files.sync_folder(path.parent)
        return FileEntry.of(path.parent, path)


@dataclass(frozen=True)
class Wanted:
    """A graph that shall be there, and all that it depends on.

    That is looked up before the code in question is imported, so that an edit during a long
    export is not taken for what was exported.
    """

    precision: str
    weights: str
    made_from: dict[str, str]

    @classmethod
    def of(cls, source: Source, precision: str, weights: str) -> Wanted:
        """What a stage of a checkpoint in a precision depends on."""
        made_from = ingredients.graph_ingredients(weights, precision, source.digest, source.config)
        return cls(precision, weights, made_from)

    def __str__(self) -> str:
        return f"{self.precision} {self.weights}"


def export_artifacts(
    checkpoint: Path, folder: Path, precisions: Sequence[str], progress: Progress
) -> list[Decision]:
    """Export every stage of a checkpoint in every precision, as far as it has changed.

    What is finished stays usable if the rest fails. Where the folder holds another checkpoint's
    graphs, or an older version's, those stay until all new ones are there, and go at one moment.

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
    try:
        if _replaces(folder, source):
            waiting = functools.partial(progress, f"waiting for another export into {folder}")
            with files.locked(folder, f"{files.LOCK}-exports", waiting=waiting):
                if reasons := _replaces(folder, source):  # still
                    _replace(folder, source, wanted, digests, progress)
                    return [Decision(str(item), reasons) for item in wanted]
        _begin(folder, source, digests)
        return [_update(folder, source, item, digests, progress) for item in wanted]
    finally:
        _model.cache_clear()
        digests.save()


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
        made = [_export(folder, source, item, staging, progress) for item in wanted]
        with folders.updated(folder, begin) as manifest:
            _put_tokenizer(folder, staging, tokenizer, manifest, digests)
            for item, entries in zip(wanted, made, strict=True):
                _put(folder, staging, item, entries, manifest, digests)
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


def _update(
    folder: Path, source: Source, item: Wanted, digests: Digests, progress: Progress
) -> Decision:
    """Export a graph if anything has changed, and commit it."""

    def begin(present: Manifest | None) -> Manifest:
        if present is None:
            raise ArtifactError("the artifacts were removed during the export", got=folder)
        source.require_of(present)
        return present

    lock = f"{files.LOCK}-{item.precision}-{item.weights}"
    waiting = functools.partial(progress, f"waiting for another export of {item}")
    with files.locked(folder, lock, waiting=waiting):
        reasons = _graph_reasons(begin(folders.find(folder)), folder, item, digests)
        if reasons:
            with files.staging_folder(folder) as staging:
                entries = _export(folder, source, item, staging, progress)
                with folders.updated(folder, begin) as manifest:
                    _put(folder, staging, item, entries, manifest, digests)
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
    folder: Path, source: Source, item: Wanted, staging: Path, progress: Progress
) -> list[GraphEntry]:
    """Export a graph into a folder of its own in `staging`; the paths are below that one."""
    from export.exporter import export_stage

    progress(f"{item}: checkpoint")
    model = _model(folder, source)
    progress(str(item))
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
