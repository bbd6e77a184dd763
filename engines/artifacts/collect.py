"""What in an artifacts folder belongs to nothing any more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from ldlm import files
from ldlm.errors import ArtifactError

# Only what has the form of a file of ours is ever looked at.
PATTERNS = ("onnx/*/*.onnx", "onnx/*/*.onnx.data", "engines/*/*/*.engine")


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can go, its size in bytes, and why."""

    path: Path
    bytes: int
    reason: str


def unlisted(folder: Path, manifest: Manifest) -> list[Path]:
    """Graphs and engines that the manifest does not speak of."""
    known = manifest.listed()
    found = (path for pattern in PATTERNS for path in sorted(folder.glob(pattern)))
    return [path for path in found if path.relative_to(folder).as_posix() not in known]


def leftovers(folder: Path) -> list[Leftover]:
    """What can go: unlisted files, and what killed processes left.

    Raises:
        ArtifactError: there are no artifacts, or their manifest is damaged.
    """
    return _leftovers(folder, folders.load(folder))


def collect(folder: Path) -> list[Leftover]:
    """Delete what can go, while nobody writes; what it was.

    Raises:
        ArtifactError: as `leftovers`.
    """
    folders.load(folder)  # before a lock is made in what may be no folder of ours
    with folders.held(folder) as manifest:
        found = _leftovers(folder, manifest)
        for item in found:
            files.remove(item.path)
    return found


def drop(folder: Path, precision: str, *, delete: bool) -> list[Leftover]:
    """The files of a precision; deleted, and taken out of the manifest, if that is asked.

    Raises:
        ArtifactError: there are no artifacts, or none in this precision.
    """

    def without(manifest: Manifest | None) -> Manifest:
        if manifest is None:
            raise ArtifactError("the artifacts were removed", got=folder)
        manifest.graphs = [e for e in manifest.graphs if e.precision != precision]
        manifest.engines = [e for e in manifest.engines if e.precision != precision]
        manifest.policies.pop(precision, None)
        return manifest

    present = folders.load(folder)
    paths = sorted(present.listed() - without(folders.load(folder)).listed())
    if not paths:
        known = ", ".join(dict.fromkeys(e.precision for e in present.graphs))
        raise ArtifactError("nothing is there in this precision", expected=known, got=precision)
    found = [
        Leftover(folder / path, (folder / path).stat().st_size, f"in {precision}")
        for path in paths
        if (folder / path).exists()
    ]
    if delete:
        with files.staging_folder(folder) as staging:
            folders.commit(folder, staging, without)
    return found


def _leftovers(folder: Path, manifest: Manifest) -> list[Leftover]:
    found = [
        Leftover(path, path.stat().st_size, "not in the manifest")
        for path in unlisted(folder, manifest)
    ]
    found += [
        Leftover(path, _size(path), "left by a process that died")
        for path in sorted(folder.rglob(f"{files.PARTIAL}*"))
        if not files.is_in_use(path)
    ]
    return found


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
