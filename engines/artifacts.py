"""Filling an artifacts folder: the graphs from a checkpoint, the engines from the graphs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from engines import manifest as manifests
from engines.manifest import EngineEntry, FileEntry, GraphEntry, Manifest
from export.precision import policy
from export.stages import DEPLOYED, AxisRange, stage
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.errors import ArtifactError

if TYPE_CHECKING:
    from ldlm.model import LDLM

TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "polygraphy", "tensorrt-rtx", "onnxruntime-gpu")
Progress = Callable[[str], None]


def export_artifacts(
    checkpoint: Path, folder: Path, precisions: Sequence[str], progress: Progress
) -> Manifest:
    """Export every stage of a checkpoint in every precision.

    The manifest is written after each graph, so what is finished stays usable. Graphs and engines
    that were made from another checkpoint leave the folder first.

    Raises:
        ConfigError, CheckpointError, ExportError, DiskSpaceError: as the steps; ArtifactError when
            the folder is not one of ours.
    """
    from export.exporter import export_stage
    from ldlm.model import LDLM

    rules = {name: policy(name) for name in precisions}
    progress("checkpoint")
    model = LDLM.from_checkpoint(checkpoint)
    require_ours(folder)
    _begin(folder, checkpoint, model)
    for name in precisions:
        for weights in DEPLOYED:
            progress(f"{name} {weights}")
            started = time.perf_counter()
            graphs = export_stage(model, weights, name, folder / "onnx" / name)
            seconds = time.perf_counter() - started
            entries = [
                GraphEntry(
                    stage=graph.spec.name,
                    precision=name,
                    graph=FileEntry.of(folder, graph.path),
                    data=FileEntry.of(folder, graph.data),
                    seconds=round(seconds, 2),
                    evidence=dict(graph.evidence),
                )
                for graph in graphs
            ]
            with manifests.updated(folder) as manifest:
                manifest.policies[name] = [dataclasses.asdict(rule) for rule in rules[name]]
                manifest.tools.update(_tool_versions())
                for entry in entries:
                    manifest.put_graph(entry)
            _remove_stale_engines(folder, manifest)
    return manifests.load(folder)


def build_artifacts(
    folder: Path,
    precisions: Sequence[str] | None,
    sms: Sequence[str],
    profile: Mapping[str, AxisRange],
    *,
    skip_unsupported: bool,
    progress: Callable[[str, int, int], None],
) -> Manifest:
    """Compile the deployed graphs of an artifacts folder with TensorRT-RTX.

    Args:
        folder: the artifacts.
        precisions: which; None is every exported one.
        sms: targets, names of `engines.compile.targets.RTX_SMS`.
        profile: allowed sizes per dynamic axis.
        skip_unsupported: leave out, and record, targets that a stage cannot have.
        progress: told (what, step, steps).

    Raises:
        ArtifactError, EngineBuildError, DiskSpaceError: as the steps.
    """
    from engines.compile.rtx import BUILDER, build_engine
    from engines.compile.targets import RTX

    manifest = manifests.load(folder)
    chosen = precisions or manifest.precisions()
    # Every input is looked at before the first engine is built.
    entries = [manifest.graph(name, weights) for name in chosen for weights in DEPLOYED]
    for entry in entries:
        label = f"{entry.precision} {entry.stage}"
        entry.data.verified(folder)
        target = folder / "engines" / entry.precision / RTX / f"{entry.stage}.engine"
        files.require_space(target, int(1.1 * entry.data.bytes))
        built = build_engine(
            entry.graph.verified(folder),
            stage(entry.stage),
            manifest.config,
            sms=sms,
            profile=profile,
            skip_unsupported=skip_unsupported,
            progress=lambda phase, step, steps, label=label: progress(  # type: ignore[misc]
                f"{label}: {phase}", step, steps
            ),
        )
        files.write_whole(target, built.plan)
        engine = EngineEntry(
            stage=entry.stage,
            precision=entry.precision,
            target=RTX,
            engine=FileEntry.of(folder, target),
            made_from=(entry.graph.sha256, entry.data.sha256),
            sms=built.sms,
            refused=built.refused,
            profile=dict(profile),
            builder=BUILDER,
            seconds=round(built.seconds, 2),
        )
        with manifests.updated(folder) as manifest:
            manifest.put_engine(engine)
    return manifests.load(folder)


def require_ours(folder: Path) -> None:
    """Refuse to write artifacts among other files.

    Raises:
        ArtifactError: the folder exists, is not empty and has no manifest.
    """
    if manifests.exists(folder) or not folder.exists():
        return
    ours = (files.LOCK, files.PARTIAL)
    if not folder.is_dir() or any(not p.name.startswith(ours) for p in folder.iterdir()):
        raise ArtifactError(
            f"{folder} is in the way",
            expected="nothing, or an artifacts folder",
            got="something else",
            remedy="choose another --out",
        )


def _begin(folder: Path, checkpoint: Path, model: LDLM) -> None:
    """Write a manifest for this checkpoint; what was made from another one leaves the folder."""
    digest = files.sha256(checkpoint / checkpoints.WEIGHTS)
    tokenizer = model.tokenizer_json
    if tokenizer is not None:
        tokenizers.parse(tokenizer, model.config)
    fresh = Manifest(checkpoint.resolve().name, digest, model.config)
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder):
        old = manifests.load(folder) if manifests.exists(folder) else fresh
        same = (old.checkpoint, old.config) == (digest, model.config)
        manifest = old if same else fresh
        # The manifest first: it must not speak of files that are about to go.
        manifest.tokenizer = None
        manifest.save(folder)
        if not same:
            _remove(folder, [e.engine for e in old.engines])
            _remove(folder, [file for e in old.graphs for file in (e.graph, e.data)])
            for name in (manifests.PARITY, manifests.QUALITY):
                (folder / name).unlink(missing_ok=True)
        if tokenizer is not None:
            path = folder / manifests.TOKENIZER
            files.write_whole(path, tokenizer.encode())
            manifest.tokenizer = FileEntry.of(folder, path)
            manifest.save(folder)


def _remove_stale_engines(folder: Path, manifest: Manifest) -> None:
    """Delete engine files that no entry of the manifest speaks of any more."""
    known = {entry.engine.path for entry in manifest.engines}
    for path in (folder / "engines").glob("*/*/*.engine"):
        if path.relative_to(folder).as_posix() not in known:
            path.unlink()


def _remove(folder: Path, entries: Sequence[FileEntry]) -> None:
    for entry in entries:
        (folder / entry.path).unlink(missing_ok=True)


def _tool_versions() -> dict[str, str]:
    found = {}
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
