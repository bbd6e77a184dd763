"""sha256 of files and texts, remembered so that no file is read twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ldlm import files


def text_digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def remembered(path: Path) -> dict[str, Any]:
    """The JSON object that an earlier process left; empty where there is nothing usable."""
    try:
        known = json.loads(files.read_if_possible(path))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


class Digests:
    """sha256 of files, remembered by size, times and inode, so that no file is read twice.

    Args:
        folder: where the memory is kept; losing it costs time, never correctness.
    """

    NAME = ".digests.json"
    SETTLED = 0.1  # seconds: a file younger than this could change within its timestamp

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._known: dict[str, list[Any]] = remembered(self._path)
        self.learned: dict[str, list[Any]] = {}  # by this object, since it was last saved

    def of(self, path: Path) -> str:
        """The sha256 of a file that is there."""
        stat = path.stat()
        state = self._state(stat)
        key = str(path.resolve())
        entry = self._known.get(key)
        if isinstance(entry, list) and len(entry) == 5 and entry[:4] == state:
            return str(entry[4])
        digest = files.sha256(path)
        if time.time() - max(stat.st_mtime, stat.st_ctime) > self.SETTLED:
            self.learned[key] = self._known[key] = [*state, digest]
        return digest

    def note(self, path: Path, digest: str) -> None:
        """Take note of a file of ours that was hashed and has just been moved to its place.

        However young it is: to change it unseen, another process would have to write to it within
        the clock tick in which it was moved.
        """
        entry = [*self._state(path.stat()), digest]
        self.learned[str(path.resolve())] = self._known[str(path.resolve())] = entry

    @staticmethod
    def _state(stat: os.stat_result) -> list[int]:
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def is_same(self, path: Path, digest: str) -> bool:
        """Whether the file is there and has this sha256."""
        return path.is_file() and self.of(path) == digest

    def save(self) -> None:
        """Keep what was learned, beside what other processes have; where that can be."""
        folder = self._path.parent
        if not self.learned or not folder.is_dir():
            return
        with contextlib.suppress(OSError), files.locked(folder, f"{files.LOCK}-digests"):
            known = remembered(self._path) | self.learned
            known = {path: entry for path, entry in known.items() if os.path.lexists(path)}
            files.write_if_possible(self._path, json.dumps(known).encode())
            self.learned = {}
