"""What in an artifacts folder belongs to nothing any more."""

from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from ldlm import files
from ldlm.errors import ArtifactError


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can go, its size in bytes, and why."""

    path: Path
    bytes: int
    reason: str


def leftovers(folder: Path) -> list[Leftover]:
    """What can go: files that the manifest does not speak of, and what killed processes left.

    Raises:
        ArtifactError: there are no artifacts, their manifest is damaged, or a link is among them.
    """
    known = folders.load(folder).listed()
    folders.require_no_links(folder)
    found = {path: "not in the manifest" for p in folders.PATTERNS for path in folder.glob(p)}
    dead = [path for path in folder.glob(f"{files.PARTIAL}*") if not files.is_in_use(path)]
    found |= dict.fromkeys(dead, "left by a process that died")
    return [
        Leftover(path, _size(path), reason)
        for path, reason in sorted(found.items())
        if path.relative_to(folder).as_posix() not in known
    ]


def collect(folder: Path) -> list[Leftover]:
    """Delete what `leftovers` finds, while nobody writes or reads; what it was."""
    return _delete(folder, leftovers(folder))


def drop(folder: Path, precision: str, *, delete: bool) -> list[Leftover]:
    """The files of a precision; deleted, and taken out of the manifest, if that is asked.

    Raises:
        ArtifactError: there are no artifacts, or none in this precision.
    """
    present, left = folders.load(folder), folders.load(folder)
    left.drop(precision)
    names = sorted(present.listed() - left.listed())
    if not names:
        known = ", ".join(dict.fromkeys(e.precision for e in present.graphs))
        raise ArtifactError("nothing is there in this precision", expected=known, got=precision)
    paths = [path for path in map(folder.joinpath, names) if path.exists()]
    found = [Leftover(path, _size(path), f"in {precision}") for path in paths]
    if delete:
        with folders.updated(folder) as manifest:
            manifest.drop(precision)
        _delete(folder, found)  # what a reader held has not gone yet
    return found


def _delete(folder: Path, found: list[Leftover]) -> list[Leftover]:
    """Delete what the manifest still does not speak of when nobody writes or reads."""
    with files.locked(folder), folders.unread(folder, wait=True):
        known = folders.load(folder).listed()
        gone = {i.path.relative_to(folder).as_posix(): i for i in found}
        gone = {name: item for name, item in gone.items() if name not in known}
        folders.delete(folder, gone)
    return list(gone.values())


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())
