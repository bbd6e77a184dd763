"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ldlm.errors import DiskSpaceError, LDLMError

LOCK = ".lock"
PARTIAL = ".partial-"
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
        # NumPy's tofile says "n requested and m written" without an errno.
        if error.errno in _FULL or (error.errno is None and "written" in str(error)):
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
    """A temporary folder inside `parent`, on the same disk; removed at the end whatever happens.

    What a killed process left there is removed first: the name holds its process id.
    """
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PARTIAL}*"):
            if not _alive(left.name.removeprefix(PARTIAL).partition("-")[0]):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        folder = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{os.getpid()}-", dir=parent))
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
            try:
                source.rename(target)
            except BaseException:
                (bin_ / "old").rename(target)
                raise


def read_text(path: Path, error: type[LDLMError], what: str) -> str:
    """The UTF-8 text of a file.

    Raises:
        error: it is not there, not readable or not text.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path} is not a readable {what}", got=str(problem)) from problem


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for, and hold, the folder's lock: for reading, changing and writing one of its files."""
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
