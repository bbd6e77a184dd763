"""An artifacts folder: its manifest is read, changed and written under the folder's lock.

What the manifest speaks of lies in folders that are named by their key, a hash of all that went
into them (`place`). Such a folder is written under a temporary name, brought to the disk, and
renamed; nothing is ever written into it again. Then manifest.json is replaced, the one file that
changes: a process that dies at any moment leaves the old artifact or the new one, and beside it
perhaps files that no manifest speaks of.

Who deletes: a writer deletes what its own commit superseded, if nobody reads; `ldlm gc` deletes
the rest. Who reads (`reading`) holds a shared lock on the folder itself, which writes nothing,
from before it reads the manifest until it has loaded its files. A writer whose commit finds it
held leaves the superseded files to `ldlm gc`, which waits. Reading changes nothing, whatever it
finds; what writes, moves or deletes refuses links (`require_no_links`).
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from engines.artifacts.digests import file_digest, text_digest
from engines.artifacts.manifest import MANIFEST, SCHEMA, TOKENIZER, Manifest
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, ConfigError

T = TypeVar("T")

# Only what has the form of a file of ours is ever deleted. The last four are of schema 2.
PATTERNS = (
    "onnx/*/*/*.onnx", "onnx/*/*/*.onnx.data", "engines/*/*/*/*.engine", f"tokenizer-*/{TOKENIZER}",
    "onnx/*/*.onnx", "onnx/*/*.onnx.data", "engines/*/*/*.engine", TOKENIZER,
)  # fmt: skip # the items of a row belong together
_WRITTEN = ("onnx", "engines", "tokenizer-", files.PARTIAL, files.LOCK)


def place(folder: str, name: str, made_from: Mapping[str, str]) -> str:
    """Where, in an artifacts folder, something goes that was made from these ingredients."""
    return f"{folder}{name}-{text_digest(json.dumps(made_from, sort_keys=True))[:12]}"


def exists(folder: Path) -> bool:
    """Whether the folder has a manifest."""
    return (folder / MANIFEST).is_file()


def load(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        ArtifactError: there is none, or it is damaged or of another schema.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(
            f"no artifacts at {folder}",
            expected=str(path),
            got="no such file",
            remedy="ldlm export CHECKPOINT makes them",
        )
    schema = _decoded(path, Versioned).schema
    if schema != SCHEMA:
        older = schema < SCHEMA
        raise ArtifactError(
            f"{path} was made by {'an older' if older else 'another'} version",
            expected=f"schema version {SCHEMA}",
            got=schema,
            remedy="export again" if older else "use that version, or another folder",
        )
    return _decoded(path, Manifest)


def is_older(folder: Path) -> bool:
    """Whether an older version, whose manifest we do not read, made the artifacts.

    Raises:
        ArtifactError: the manifest is damaged.
    """
    return exists(folder) and _decoded(folder / MANIFEST, Versioned).schema < SCHEMA


def find(folder: Path) -> Manifest | None:
    """As `load`; None where there is no manifest, or an older version's."""
    return load(folder) if exists(folder) and not is_older(folder) else None


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Manifest]:
    """The manifest, as `load` gives it, while no writer deletes a file that it speaks of."""
    if not folder.is_dir():
        load(folder)  # says so
    with contextlib.ExitStack() as held:
        # Where a file system has no locks, a writer gets none either, and deletes nothing.
        with contextlib.suppress(OSError):
            held.enter_context(_locked(folder, fcntl.LOCK_SH))
        yield load(folder)


@contextlib.contextmanager
def updated(
    folder: Path, begin: Callable[[Manifest | None], Manifest] | None = None
) -> Iterator[Manifest]:
    """Read the manifest, let it be changed, and write it, while no other process does the same.

    Files that it spoke of and speaks of no more are deleted afterwards, unless somebody reads.

    Args:
        folder: the artifacts.
        begin: what is to be changed, from the present manifest or, where there is none that we
            can read, from None; default: the present one.

    Raises:
        ArtifactError: as `load` and `require_no_links`.
    """
    require_no_links(folder)
    with files.locked(folder):
        present = load(folder) if begin is None else find(folder)
        old = present.listed() if present is not None else set()
        manifest = begin(present) if begin is not None else load(folder)
        yield manifest
        manifest.save(folder)
        with contextlib.suppress(OSError), unread(folder, wait=False):
            delete(folder, old - manifest.listed())


@contextlib.contextmanager
def unread(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keep readers out of the folder.

    Raises:
        OSError: somebody reads, and `wait` was not asked for.
    """
    with _locked(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
        yield


def delete(folder: Path, paths: Iterable[str]) -> None:
    """Delete what is ours, by paths below the folder, and folders that are empty then."""
    for path in map(Path, paths):
        if any(
            path.match(pattern) and len(path.parts) == pattern.count("/") + 1
            for pattern in (*PATTERNS, f"{files.PARTIAL}*")
        ):
            files.remove(folder / path)
            for parent in list(path.parents)[:-1]:
                with contextlib.suppress(OSError):  # something else is in it
                    (folder / parent).rmdir()


def require_no_links(folder: Path) -> None:
    """Refuse to write, move or delete where a link leads elsewhere.

    Raises:
        ArtifactError: there is one among what is ours.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(_WRITTEN):
            below = [Path(top, n) for top, inner, names in os.walk(entry) for n in inner + names]
            for path in (entry, *below):
                if path.is_symlink():
                    raise files.a_link(path)


def origin_of(checkpoint: Path) -> tuple[str, LDLMConfig]:
    """What a manifest says of a checkpoint folder (`Manifest.origin`); it is not loaded.

    Raises:
        CheckpointError, ConfigError: it is not usable.
    """
    config = checkpoints.read_config(checkpoint)
    checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
    return file_digest(checkpoint / checkpoints.WEIGHTS), config


def require_origin(manifest: Manifest, checkpoint: Path) -> Path:
    """The checkpoint folder, if the artifacts were made from it.

    Raises:
        ArtifactError: they were made from another one.
        CheckpointError, ConfigError: it is not usable.
    """
    found, config = origin_of(checkpoint)
    for origin, expected, got in (
        ("with another configuration", manifest.config, config),
        ("from another checkpoint", f"sha256 {manifest.checkpoint}", f"sha256 {found}"),
    ):
        if expected != got:
            raise ArtifactError(
                f"the artifacts were made {origin}",
                expected=expected,
                got=got,
                remedy="ldlm export this checkpoint first",
            )
    return checkpoint


def require_ours(folder: Path) -> None:
    """Refuse to write artifacts among other files, or through links.

    Raises:
        ArtifactError: the folder exists, is not empty and has no manifest; or there is a link.
    """
    # Older versions remembered the files' hashes in the third.
    ours = (files.LOCK, files.PARTIAL, ".digests.json", "tokenizer-")
    if (
        folder.exists()
        and not exists(folder)
        and not (folder.is_dir() and all(path.name.startswith(ours) for path in folder.iterdir()))
    ):
        raise ArtifactError(
            f"{folder} is in the way",
            expected="nothing, or an artifacts folder",
            got="something else",
            remedy="choose another --out",
        )
    require_no_links(folder)


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock on the folder itself, which writes nothing."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, how)
        yield
    finally:
        os.close(held)


class Versioned(msgspec.Struct):
    """What a manifest of any version has."""

    schema: int


def _decoded(path: Path, schema: type[T]) -> T:
    """A manifest's content, as far as the schema goes."""
    try:
        content = files.read_text(path, ArtifactError, "manifest")
        return msgspec.json.decode(content, type=schema)
    except (msgspec.DecodeError, ConfigError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is damaged", got=repr(error), remedy="remove the folder and export again"
        ) from error
