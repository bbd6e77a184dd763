"""Files that appear whole or not at all."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ldlm.errors import ArtifactError, DiskSpaceError, LDLMError

log = logging.getLogger(__name__)

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

    What a killed process left there is removed first: nobody holds it any more.
    """
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{PARTIAL}*"):
            if not is_in_use(left):
                remove(left)
        folder = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{os.getpid()}-", dir=parent))
        # Held as long as we live; another host, which does not know our process, sees it.
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def is_in_use(partial: Path) -> bool:
    """Whether the process that made a temporary folder is alive, or the folder is not ours."""
    name = re.fullmatch(rf"{re.escape(PARTIAL)}(\d{{1,9}})-\w+", partial.name)
    if name is None or partial.is_symlink() or _alive(int(name.group(1))):
        return True
    try:
        descriptor = os.open(partial, os.O_RDONLY)
    except OSError:
        return not partial.exists()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder; that it is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish(source: Path, target: Path) -> None:
    """Move a finished file to its place: fsync, then rename over whatever is there."""
    with disk_errors(target):
        _fsync(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        _fsync(target.parent)


def sync_folder(source: Path) -> None:
    """Bring a finished folder to the disk, so that what is left to do for it is one rename."""
    with disk_errors(source):
        for path in (*source.rglob("*"), source):
            _fsync(path)


def publish_new(source: Path, folder: Path, place: str) -> str:
    """Move a synced folder to a place of its own; what stands anywhere is never replaced.

    Args:
        source: the finished folder.
        folder: the folder that it shall be in.
        place: the path below it. Where something stands there, "-2" and so on is appended.

    Returns:
        The path below `folder` that it got.
    """
    name, number = place, 1
    with disk_errors(folder / place):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        while not _renamed(source, folder / name):
            number += 1
            name = f"{place}-{number}"
        for parent in (folder / name).parents[: len(Path(name).parts)]:
            _fsync(parent)
    return name


def _renamed(source: Path, target: Path) -> bool:
    """Rename a folder, unless something stands there."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def write_whole(target: Path, content: bytes) -> None:
    """Write a file so that it is seen either as it was or as it shall be."""
    with staging_folder(target.parent) as folder:
        part = folder / target.name
        part.write_bytes(content)
        publish(part, target)


def write_if_possible(target: Path, content: bytes) -> None:
    """Write what is only remembered; where that cannot be, the log says so and work goes on."""
    try:
        write_whole(target, content)
    except (OSError, DiskSpaceError) as error:
        log.warning("%s cannot be kept: %s", target, error)


def read_if_possible(path: Path) -> bytes:
    """What was remembered; nothing where there is nothing readable."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(source: Path, target: Path) -> None:
    """Move a finished folder to its place; an older one there is removed afterwards.

    On Linux the two change places at one moment. Elsewhere there is a moment without either.
    """
    with disk_errors(target):
        for file in source.iterdir():
            _fsync(file)
        if not target.exists():
            source.rename(target)
            return
        if _exchange(source, target):
            shutil.rmtree(source)
            return
        with staging_folder(target.parent) as bin_:
            target.rename(bin_ / "old")
            try:
                source.rename(target)
            except BaseException:
                (bin_ / "old").rename(target)
                raise


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ldlm-engines"


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
def locked(
    folder: Path, name: str = LOCK, *, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Wait for, and hold, a lock of the folder; the system releases it if the process dies.

    Args:
        folder: whose lock.
        name: the plain one is for reading, changing and writing one of the folder's files;
            others, which begin with its name, for what takes long.
        waiting: told once, if another process holds it.

    Raises:
        ArtifactError: a link stands where the lock's file should be.
    """
    path = folder / name
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise a_link(path) from error
        raise
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def a_link(path: Path) -> ArtifactError:
    """The error for a link among what would be written, moved or deleted."""
    return ArtifactError(
        f"{path} is a link",
        expected="a file or folder of its own: what is written, moved or deleted follows no link",
        got=f"a link to {path.readlink()}",
        remedy="remove the link, or choose another folder",
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places, where the system can: Linux's renameat2."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
