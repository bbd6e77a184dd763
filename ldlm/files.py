"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ldlm.errors import DiskSpaceError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into an error that names the path and what is free.

    Raises:
        DiskSpaceError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_space(path, "more") from error
        raise


def no_space(path: Path, needed: str) -> DiskSpaceError:
    """The error for a disk that cannot hold what is to be written at `path`."""
    return DiskSpaceError(
        f"no disk space left for {path}",
        expected=f"{needed} bytes",
        got=f"{free_bytes(path):,} bytes free",
        remedy="free space, or choose another folder; nothing was left half-written",
    )


def free_bytes(path: Path) -> int:
    """Bytes free on the disk that holds, or would hold, `path`."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(path: Path, needed: int) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        DiskSpaceError: fewer than `needed` bytes are free where `path` would be.
    """
    if free_bytes(path) < needed:
        raise no_space(path, f"{needed:,}")


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder inside `parent`, on the same disk; removed at the end whatever happens."""
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def publish(source: Path, target: Path) -> None:
    """Move a finished file to its place: fsync, then rename over whatever is there."""
    with disk_errors(target):
        _fsync(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def write_whole(target: Path, content: bytes) -> None:
    """Write a file so that it is seen either as it was or as it shall be."""
    with staging_folder(target.parent) as folder:
        part = folder / target.name
        part.write_bytes(content)
        publish(part, target)


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(source: Path, target: Path) -> None:
    """Move a finished folder to its place; an older one there is removed afterwards."""
    with disk_errors(target):
        for file in source.iterdir():
            _fsync(file)
        if not target.exists():
            source.rename(target)
            return
        with staging_folder(target.parent) as bin_:
            target.rename(bin_ / "old")
            source.rename(target)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
