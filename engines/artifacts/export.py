"""Filling an artifacts folder with the graphs of a checkpoint.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together
with the manifest that speaks of it (`engines.artifacts.folder.commit`), so that a process that dies
at any moment leaves the old artifact or the new one.
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
EXPORTS = f"{files.LOCK}-exports"
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

    def put_tokenizer(self, staging: Path, manifest: Manifest) -> None:
        """Stage tokenizer.json, where there is one.

        Raises:
            TokenizerError: it does not fit the model.
        """
        manifest.tokenizer = None
        if self.tokenizer is not None:
            tokenizers.parse(self.tokenizer, self.config)
            path = staging / manifests.TOKENIZER
            path.write_text(self.tokenizer, "utf-8")
            manifest.tokenizer = FileEntry.of(staging, path)


def export_artifacts(
    checkpoint: Path, folder: Path, precisions: Sequence[str], progress: Progress
) -> list[Decision]:
    """Export every stage of a checkpoint in every precision, as far as it has changed.

    What is finished stays usable if the rest fails. Where the folder holds another checkpoint's
    graphs, those stay until all new ones are there, and go at one moment.

    Returns:
        For every stage and precision, whether it was exported and why.

    Raises:
        ConfigError, CheckpointError, ExportError, DiskSpaceError: as the steps; ArtifactError when
            the folder is not one of ours.
    """
    require_ours(folder)
    digests = Digests(folder)
    source = Source.of(checkpoint, digests)
    wanted = [Wanted.of(source, name, weights) for name in precisions for weights in components()]
    folder.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        progress(f"waiting for another export into {folder}")

    while True:
        if _replaces(folder, source):
            with files.locked(folder, EXPORTS, waiting=waiting):
                if _replaces(folder, source):  # still: another process may have done it meanwhile
                    return _replace(folder, source, wanted, digests, progress)
        with files.locked(folder, EXPORTS, shared=True, waiting=waiting):
            if not _replaces(folder, source):  # still
                decisions = _update(folder, source, wanted, digests, progress)
                digests.save()
                return decisions


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


def _replaces(folder: Path, source: Source) -> bool:
    if not folders.exists(folder):
        return False
    manifest = folders.load(folder)
    return bool(manifest.graphs) and not source.is_of(manifest)


def _replace(
    folder: Path,
    source: Source,
    wanted: Sequence[Wanted],
    digests: Digests,
    progress: Progress,
) -> list[Decision]:
    """Export everything beside the old files, then exchange them at one moment."""
    old = folders.load(folder)
    reasons = ingredients.changes(
        {"weights": old.checkpoint, "config": text_digest(old.config.to_json())},
        {"weights": source.digest, "config": text_digest(source.config.to_json())},
    )
    progress(f"in place of the artifacts of another checkpoint, {old.name}")
    model = _load(source, digests, progress)
    manifest = source.fresh()
    with files.staging_folder(folder) as staging:
        source.put_tokenizer(staging, manifest)
        for item in wanted:
            progress(str(item))
            _put(manifest, item.precision, _export(model, item, staging))
        folders.commit(folder, staging, lambda _: manifest)
    _note(folder, digests, manifest.graphs, manifest.tokenizer)
    digests.save()
    for name in (manifests.PARITY, manifests.QUALITY):
        (folder / name).unlink(missing_ok=True)
    return [Decision(str(item), reasons) for item in wanted]


def _update(
    folder: Path,
    source: Source,
    wanted: Sequence[Wanted],
    digests: Digests,
    progress: Progress,
) -> list[Decision]:
    """Export graph by graph what has changed; each is committed when it is done."""
    _begin(folder, source, digests)
    decisions = []
    model: LDLM | None = None
    for item in wanted:
        lock = f"{files.LOCK}-{item.precision}-{item.weights}"
        waiting = functools.partial(progress, f"waiting for another export of {item}")
        with files.locked(folder, lock, waiting=waiting):
            reasons = _graph_reasons(folders.load(folder), folder, item, digests)
            decisions.append(Decision(str(item), reasons))
            if not reasons:
                continue
            model = model or _load(source, digests, progress)
            progress(str(item))
            with files.staging_folder(folder) as staging:
                entries = _export(model, item, staging)
                folders.commit(folder, staging, _adding(source, item.precision, entries))
            _note(folder, digests, entries)
    return decisions


def _note(
    folder: Path, digests: Digests, graphs: Sequence[GraphEntry], tokenizer: FileEntry | None = None
) -> None:
    """What was just written need not be read again."""
    found = [file for entry in graphs for file in (entry.graph, entry.data)]
    for file in [*found, *([tokenizer] if tokenizer is not None else [])]:
        digests.note(folder / file.path, file.sha256)


def _begin(folder: Path, source: Source, digests: Digests) -> None:
    """A manifest to add to, and the checkpoint's present tokenizer."""
    with files.locked(folder, f"{files.LOCK}-tokenizer"):
        if folders.exists(folder):
            manifest = folders.load(folder)
            entry = manifest.tokenizer
            if source.is_of(manifest) and (
                source.tokenizer is None
                if entry is None
                else entry.sha256 == text_digest(source.tokenizer or "")
                and digests.is_same(folder / entry.path, entry.sha256)
            ):
                return
        with files.staging_folder(folder) as staging:

            def change(present: Manifest | None) -> Manifest:
                if present is not None and present.graphs:
                    source.require_of(present)
                ours = present is not None and source.is_of(present)
                manifest = present if present is not None and ours else source.fresh()
                source.put_tokenizer(staging, manifest)
                return manifest

            manifest = folders.commit(folder, staging, change)
        _note(folder, digests, [], manifest.tokenizer)


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


def _load(source: Source, digests: Digests, progress: Progress) -> LDLM:
    """The model, if its file is still the one that was looked at.

    Raises:
        CheckpointError: it has been replaced meanwhile.
    """
    from ldlm.model import LDLM

    progress("checkpoint")
    model = LDLM.from_checkpoint(source.folder)
    found = digests.of(source.folder / checkpoints.WEIGHTS)
    if found != source.digest:
        raise CheckpointError(
            f"{source.folder} was replaced during the export",
            expected=f"sha256 {source.digest}",
            got=f"sha256 {found}",
            remedy="export again",
        )
    return model


def _export(model: LDLM, wanted: Wanted, staging: Path) -> list[GraphEntry]:
    from export.exporter import export_stage

    started = time.perf_counter()
    folder = staging / "onnx" / wanted.precision
    graphs = export_stage(model, wanted.weights, wanted.precision, folder)
    seconds = round(time.perf_counter() - started, 2)
    return [
        GraphEntry(
            stage=graph.spec.name,
            precision=wanted.precision,
            graph=FileEntry.of(staging, graph.path),
            data=FileEntry.of(staging, graph.data),
            made_from=wanted.made_from,
            seconds=seconds,
            evidence=dict(graph.evidence),
        )
        for graph in graphs
    ]


def _put(manifest: Manifest, name: str, entries: Sequence[GraphEntry]) -> None:
    manifest.policies[name] = [dataclasses.asdict(rule) for rule in Precision.of(name).rules]
    manifest.tools.update(ingredients.tool_versions(TOOLS))
    for entry in entries:
        manifest.put_graph(entry)


def _adding(
    source: Source, name: str, entries: Sequence[GraphEntry]
) -> Callable[[Manifest | None], Manifest]:
    def change(manifest: Manifest | None) -> Manifest:
        if manifest is None:
            raise ArtifactError("the artifacts were removed during the export")
        source.require_of(manifest)
        _put(manifest, name, entries)
        return manifest

    return change
