"""An artifacts folder: its manifest is read, changed and written under the folder's lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from engines.artifacts.digests import Digests
from engines.artifacts.manifest import MANIFEST, SCHEMA, Manifest
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm.errors import ArtifactError, ConfigError


def exists(folder: Path) -> bool:
    """Whether the folder has a manifest, or is about to: a commit was cut after its moment."""
    return (folder / MANIFEST).is_file() or (folder / files.COMMIT).is_dir()


@contextlib.contextmanager
def updated(folder: Path) -> Iterator[Manifest]:
    """Read the manifest, let it be changed, and write it, while no other process does the same."""
    with held(folder) as manifest:
        yield manifest
        manifest.save(folder)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Manifest]:
    """The manifest, while no other process changes it or the files that it speaks of."""
    with files.locked(folder):
        files.finish_commit(folder, MANIFEST)
        yield _read(folder)


def commit(folder: Path, staging: Path, change: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Put new files and the manifest that speaks of them into the folder, at one moment.

    Files that the old manifest speaks of and the new one does not are deleted afterwards.

    Args:
        folder: the artifacts.
        staging: a folder inside it, with the new files under the paths that they shall have.
        change: the new manifest from the present one, or from None where there is none.
    """
    with files.locked(folder):
        files.finish_commit(folder, MANIFEST)
        present = _read(folder) if exists(folder) else None
        old = present.listed() if present is not None else set()
        manifest = change(present)
        (staging / MANIFEST).write_bytes(manifest.to_json())
        files.commit(staging, folder, MANIFEST)
        for path in old - manifest.listed():
            (folder / path).unlink(missing_ok=True)
    return manifest


def load(folder: Path) -> Manifest:
    """Read a folder's manifest, after a commit that was cut has been finished.

    Raises:
        ArtifactError: there is none, or it is damaged or of another schema.
    """
    if (folder / files.COMMIT).exists():
        with files.locked(folder):
            files.finish_commit(folder, MANIFEST)
    return _read(folder)


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(
            f"no artifacts at {folder}",
            expected=str(path),
            got="no such file",
            remedy="ldlm export CHECKPOINT makes them",
        )
    text = files.read_text(path, ArtifactError, "manifest")
    remedy = "remove the folder and export again"
    try:
        document = msgspec.json.decode(text)
        schema = document["schema"]
        if schema != SCHEMA:
            raise ArtifactError(
                f"{path} has another schema version", expected=SCHEMA, got=schema, remedy=remedy
            )
        return msgspec.convert(document, Manifest)
    except (msgspec.DecodeError, ConfigError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged", got=repr(error), remedy=remedy) from error


def require_origin(
    manifest: Manifest, checkpoint: Path, digest: Callable[[Path], str] = files.sha256
) -> Path:
    """The checkpoint folder, if the artifacts were made from it.

    Args:
        manifest: of the artifacts.
        checkpoint: the checkpoint folder.
        digest: the sha256 of a file.

    Raises:
        ArtifactError: the artifacts were made from another one.
        CheckpointError: there is none at the path.
    """
    config = checkpoints.read_config(checkpoint)
    checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
    found = digest(checkpoint / checkpoints.WEIGHTS)
    if config != manifest.config:
        raise ArtifactError(
            "the artifacts were made with another configuration",
            expected=manifest.config,
            got=config,
            remedy="ldlm export this checkpoint first",
        )
    if found != manifest.checkpoint:
        raise ArtifactError(
            "the artifacts were made from another checkpoint",
            expected=f"sha256 {manifest.checkpoint}",
            got=f"sha256 {found}",
            remedy="ldlm export this checkpoint first",
        )
    return checkpoint


def require_ours(folder: Path) -> None:
    """Refuse to write artifacts among other files.

    Raises:
        ArtifactError: the folder exists, is not empty and has no manifest.
    """
    if exists(folder) or not folder.exists():
        return
    ours = (files.LOCK, files.PARTIAL, files.COMMIT, Digests.NAME)
    if not folder.is_dir() or any(not p.name.startswith(ours) for p in folder.iterdir()):
        raise ArtifactError(
            f"{folder} is in the way",
            expected="nothing, or an artifacts folder",
            got="something else",
            remedy="choose another --out",
        )


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Manifest]:
    """The manifest, while its files are loaded."""
    yield load(folder)
