"""An engine file, after everything was checked that can be without asking TensorRT.

TensorRT's own answer to an engine of another GPU or version is an opaque one, and two engines of
one architecture with other weights look the same to it.
"""

from pathlib import Path

from engines.artifacts.manifest import EngineEntry, Manifest, read
from engines.runtime.trt import TrtRuntime
from engines.tensorrt.targets import NO_RTX, target_of
from ldlm.errors import ArtifactError


def checked_engine(
    runtime: TrtRuntime, folder: Path, manifest: Manifest, stage: str, precision: str
) -> tuple[EngineEntry, bytes]:
    """The entry and the bytes of an engine that the runtime's GPU and library can run.

    Raises:
        ArtifactError: it was not built, or built for other GPUs, by another version, or from
            another graph; or the file is missing, cut or changed.
    """
    sm, version = runtime.device.sm, runtime.version
    target = target_of(runtime.name, sm)
    build = f"ldlm build {folder} --precision {precision} --target {runtime.name}"
    entry = manifest.engine(precision, stage, target)
    if entry is None:
        built = sorted({f"{e.precision} {e.target}" for e in manifest.engines if e.stage == stage})
        raise ArtifactError(
            "this engine was not built",
            stage=stage,
            expected=f"{precision} {target}",
            got=", ".join(built) or "no engine of this stage",
            remedy=build,
        )
    if sm not in entry.sms:
        raise ArtifactError(
            "the engine was built for other GPUs",
            stage=stage,
            expected=" ".join(entry.sms),
            got=f"{sm}: {entry.refused[sm]}" if sm in entry.refused else sm,
            remedy=_other_gpu(folder, entry, sm),
        )
    built_by = entry.builder.get("version", "unknown")
    # Engines of one minor version may not load in another.
    if built_by.split(".")[:2] != version.split(".")[:2]:
        raise ArtifactError(
            "the engine was built by another version of TensorRT",
            stage=stage,
            expected=f"{entry.builder.get('library')} {built_by}",
            got=version,
            remedy="install that version, or ldlm build with this one",
        )
    if not entry.is_of(manifest.graph(precision, stage)):
        problem = "the engine was made from another graph than the one beside it"
        raise ArtifactError(problem, stage=stage, remedy=build)
    return entry, read(entry.engine, folder)


def _other_gpu(folder: Path, entry: EngineEntry, sm: str) -> str:
    """What helps on a GPU that an engine was not built for, without losing the others."""
    if sm in NO_RTX:
        return f"{NO_RTX[sm]}: --target trt"
    if sm in entry.refused:
        return "--runtime ort, or plain TensorRT: --target trt"
    sms = ",".join((*entry.sms, sm))
    return f"ldlm build {folder} --precision {entry.precision} --sm {sms}, with its --profile"
