"""Files that appear whole or not at all: the order of what is done, links, locks, full disks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ldlm import files
from ldlm.errors import ArtifactError, DiskSpaceError

Events = list[tuple[str, str]]
DEAD = f"{files.PARTIAL}999999999-x"  # no process has this number


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What is synced, and what is moved to which place, in order."""
    seen: Events = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))  # noqa: PTH115
        fsync(descriptor)

    def moving(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def moved(self: Path, target: Path) -> Path:
            seen.append(("move", target.name))
            return move(self, target)

        return moved

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, moving(getattr(Path, name)))
    return seen


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, events: Events) -> None:
    """And then its name is: after a power cut there is the old file or the new one."""
    source, folder = tmp_path / "part", tmp_path / "folder"
    source.write_bytes(b"content")
    files.publish(source, folder / "file")
    assert events == [("sync", "part"), ("move", "file"), ("sync", "folder")]
    assert (folder / "file").read_bytes() == b"content"


def test_a_folders_files_are_on_the_disk_before_its_name_is(tmp_path: Path, events: Events) -> None:
    source = tmp_path / "part"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_bytes(b"content")
    files.publish_folder(source, tmp_path / "folder")
    assert sorted(events[:2]) == [("sync", "a"), ("sync", "b")]
    assert events[2:] == [("move", "folder")]


def test_a_folder_in_its_place_is_on_the_disk_at_every_level(
    tmp_path: Path, events: Events
) -> None:
    """Its files in subfolders first, then its name, then the folders that it is in."""
    source = tmp_path / "part"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_bytes(b"content")
    files.sync_folder(source)
    assert sorted(events) == [("sync", "file"), ("sync", "part"), ("sync", "sub")]
    events.clear()
    assert files.publish_new(source, tmp_path / "folder", "above/place") == "above/place"
    assert events == [("move", "place"), ("sync", "above"), ("sync", "folder")]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    files.write_whole(target, b"old")

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        files.write_whole(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    """By a file, by an empty folder, or by a full one: nothing of it is replaced."""
    folder = tmp_path / "folder"
    (folder / "place").mkdir(parents=True)
    (folder / "place" / "theirs").write_text("years of work")
    (folder / "place-2").write_text("years of work")
    for expected in ("place-3", "place-4"):
        source = tmp_path / "source"
        source.mkdir()
        (source / "ours").write_text(expected)
        assert files.publish_new(source, folder, "place") == expected
        assert (folder / expected / "ours").read_text() == expected
    assert [path.name for path in (folder / "place").iterdir()] == ["theirs"]
    assert (folder / "place-2").read_text() == "years of work"


def test_a_temporary_folder_is_held_by_a_lock(tmp_path: Path) -> None:
    """Another host does not know our process: the lock tells it that the folder is in use."""
    with files.staging_folder(tmp_path) as folder:
        assert files.is_in_use(folder)
        other = folder.rename(tmp_path / DEAD)
        assert files.is_in_use(other)
        held = os.open(other, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
    assert not files.is_in_use(other)


def test_a_process_of_another_user_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / DEAD
    left.mkdir()
    assert not files.is_in_use(left)

    def not_yours(_pid: int, _signal: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", not_yours)
    assert files.is_in_use(left)


def test_a_link_with_a_temporary_folders_name_is_left_alone(tmp_path: Path) -> None:
    theirs, folder = tmp_path / "theirs", tmp_path / "folder"
    theirs.mkdir()
    folder.mkdir()
    link = folder / DEAD
    link.symlink_to(theirs)
    with files.staging_folder(folder):
        assert link.is_symlink()
    assert files.is_in_use(link)


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("years of work")
    link = tmp_path / "link"
    link.symlink_to(theirs)
    files.remove(link)
    assert not link.is_symlink()
    assert (theirs / "file").read_text() == "years of work"
    files.remove(link)  # it is gone already


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_quota_or_file_is_named(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskSpaceError, match="no disk space left"), files.disk_errors(tmp_path):
        raise OSError(number, "no room")
    with pytest.raises(PermissionError), files.disk_errors(tmp_path):
        raise OSError(errno.EACCES, "Permission denied")


def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / files.LOCK).symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match="is a link"), files.locked(folder):
        pass
    assert not elsewhere.exists()
