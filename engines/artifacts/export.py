"""Filling an artifacts folder: the graphs from a checkpoint, the engines from the graphs.

Only what has changed is made again (`engines.artifacts.ingredients`). Every file appears together with the manifest
that speaks of it (`engines.artifacts.manifest.commit`), so that a process that dies at any moment leaves the
old artifact or the new one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.artifacts import ingredients as keys
from engines.artifacts import manifest as manifests
from engines.artifacts.ingredients import Decision, Digests
from engines.artifacts.manifest import EngineEntry, FileEntry, GraphEntry, Manifest
from engines.compile.target import Profiles, Target
from engines.tensorrt.targets import compilable, require_compilable
from export.precision import policy
from export.stages import COMPILED, DEPLOYED, sharing, stage
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, CheckpointError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = dict.fromkeys([*keys.GRAPH_TOOLS, *keys.ENGINE_TOOLS, *keys.PROOF_TOOLS])
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
    wanted = [Wanted.of(source, name, weights) for name in precisions for weights in DEPLOYED]
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
        made_from = keys.graph_ingredients(weights, precision, source.digest, source.config)
        return cls(precision, weights, made_from)

    def __str__(self) -> str:
        return f"{self.precision} {self.weights}"


def _replaces(folder: Path, source: Source) -> bool:
    if not manifests.exists(folder):
        return False
    manifest = manifests.load(folder)
    return bool(manifest.graphs) and not source.is_of(manifest)


def _replace(
    folder: Path,
    source: Source,
    wanted: Sequence[Wanted],
    digests: Digests,
    progress: Progress,
) -> list[Decision]:
    """Export everything beside the old files, then exchange them at one moment."""
    old = manifests.load(folder)
    reasons = keys.changes(
        {"weights": old.checkpoint, "config": keys.text_digest(old.config.to_json())},
        {"weights": source.digest, "config": keys.text_digest(source.config.to_json())},
    )
    progress(f"in place of the artifacts of another checkpoint, {old.name}")
    model = _load(source, digests, progress)
    manifest = source.fresh()
    with files.staging_folder(folder) as staging:
        source.put_tokenizer(staging, manifest)
        for item in wanted:
            progress(str(item))
            _put(manifest, item.precision, _export(model, item, staging))
        manifests.commit(folder, staging, lambda _: manifest)
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
            reasons = _graph_reasons(manifests.load(folder), folder, item, digests)
            decisions.append(Decision(str(item), reasons))
            if not reasons:
                continue
            model = model or _load(source, digests, progress)
            progress(str(item))
            with files.staging_folder(folder) as staging:
                entries = _export(model, item, staging)
                manifests.commit(folder, staging, _adding(source, item.precision, entries))
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
        if manifests.exists(folder):
            manifest = manifests.load(folder)
            entry = manifest.tokenizer
            if source.is_of(manifest) and (
                source.tokenizer is None
                if entry is None
                else entry.sha256 == keys.text_digest(source.tokenizer or "")
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

            manifest = manifests.commit(folder, staging, change)
        _note(folder, digests, [], manifest.tokenizer)


def _graph_reasons(
    manifest: Manifest, folder: Path, wanted: Wanted, digests: Digests
) -> tuple[str, ...]:
    """Why a graph must be exported; empty if what is there is what would come out."""
    for spec in sharing(wanted.weights, wanted.precision):
        entry = manifest.find_graph(wanted.precision, spec.name)
        if entry is None:
            return ("not exported yet",)
        if changed := keys.changes(entry.made_from, wanted.made_from):
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
    manifest.policies[name] = [dataclasses.asdict(rule) for rule in policy(name)]
    manifest.tools.update(keys.tool_versions(TOOLS))
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
    manifest = manifests.load(folder)
    exported = manifest.precisions()
    chosen = precisions or list(filter(compilable, exported)) or exported
    require_compilable(chosen)
    # Every input is looked up before the first engine is built.
    wanted = [manifest.graph(name, compiled) for name in chosen for compiled in COMPILED]
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
    manifest = manifests.load(folder)  # it may be newer than `graph`
    graph = manifest.graph(graph.precision, graph.stage)
    if not stage(graph.stage).dynamic:
        profiles = {}
    made_from = keys.engine_ingredients(graph.graph.sha256, graph.data.sha256, target, profiles)
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
    if changed := keys.changes(entry.made_from, made_from):
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
        manifests.commit(folder, staging, lambda present: _with_engine(folder, present, entry))
    return entry.engine


def _with_engine(folder: Path, manifest: Manifest | None, entry: EngineEntry) -> Manifest:
    if manifest is None:
        raise ArtifactError("the artifacts were removed while an engine was built", got=folder)
    manifest.put_engine(entry)
    # No build would ever replace an engine of a stage that is compiled no more.
    manifest.engines = [e for e in manifest.engines if e.stage in COMPILED]
    return manifest


def require_ours(folder: Path) -> None:
    """Refuse to write artifacts among other files.

    Raises:
        ArtifactError: the folder exists, is not empty and has no manifest.
    """
    if manifests.exists(folder) or not folder.exists():
        return
    ours = (files.LOCK, files.PARTIAL, files.COMMIT, Digests.NAME)
    if not folder.is_dir() or any(not p.name.startswith(ours) for p in folder.iterdir()):
        raise ArtifactError(
            f"{folder} is in the way",
            expected="nothing, or an artifacts folder",
            got="something else",
            remedy="choose another --out",
        )
