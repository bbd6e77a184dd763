"""Tests change nothing but decoys: the guard refuses, here and in processes that tests start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import only_decoys
import pytest

ROOT = Path(__file__).parents[1]
# A name that is nowhere: if the guard failed, nothing would be lost.
NOWHERE = ROOT / "nothing-of-this-name"


@pytest.mark.parametrize(
    "change",
    [
        NOWHERE.unlink,
        NOWHERE.rmdir,
        lambda: shutil.rmtree(NOWHERE),
        lambda: NOWHERE.rename(NOWHERE.with_suffix(".moved")),
        lambda: os.replace(NOWHERE, NOWHERE.with_suffix(".moved")),  # noqa: PTH105
        lambda: os.symlink(NOWHERE, NOWHERE.with_suffix(".link")),  # noqa: PTH211
        lambda: os.truncate(NOWHERE, 0),
    ],
)
def test_a_change_outside_the_temporary_folders_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(only_decoys.NotADecoy, match="decoys alone"):
        change()


def test_a_link_to_the_outside_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT)
    with pytest.raises(only_decoys.NotADecoy):
        (tmp_path / "link" / NOWHERE.name).unlink()
    (tmp_path / "link").unlink()  # the link itself is a decoy
    assert ROOT.exists()


def test_what_is_in_a_temporary_folder_may_go(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    shutil.rmtree(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_processes_that_tests_start_are_guarded() -> None:
    code = f"import os; os.unlink({str(NOWHERE)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "NotADecoy" in done.stderr
