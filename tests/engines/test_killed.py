"""Builds that are killed, and builds that run at once: the old artifact or the new one, whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import stub_export
from killed_export import require_tidy, require_whole, weights_of

from engines.artifacts import folder as folders
from engines.artifacts.collect import collect, drop, leftovers
from engines.artifacts.inspect import describe
from export.stages import compiled, components, stages_of
from ldlm import LDLM, PRESETS, files
from ldlm.errors import ArtifactError
from ldlm.initialise import initialise

HELPERS = Path(stub_export.__file__).parent


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one architecture."""
    folders = []
    for seed in (0, 1, 2):
        folders.append(tmp_path_factory.mktemp("checkpoints") / f"seed{seed}")
        initialise(LDLM(PRESETS["small"]), seed).save_checkpoint(folders[-1])
    return folders


def start(
    checkpoint: Path, folder: Path, precisions: str, log: Path, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    script = HELPERS / "stub_export.py"
    command = [sys.executable, script, checkpoint, folder, precisions, log]
    return subprocess.Popen(command, stderr=stderr)


def graphs_in(precision: str) -> int:
    return sum(len(stages_of(weights)) for weights in components())


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=60) == 0


CASES = {  # the artifacts that are there, what is made, and the manifests there may be after a kill
    "first export": (None, "export", "fp32", {"none", "new"}),
    "another checkpoint": (0, "export", "fp32", {"old", "new"}),
    "engines": (1, "build", "fp32", {"new"}),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_before_every_change_of_the_disk(
    checkpoints: list[Path], tmp_path: Path, case: str
) -> None:
    """The manifest speaks of the old artifact or the new one, and the same command works again."""
    present, what, names, outcomes = CASES[case]
    folder = tmp_path / "start"
    if present is not None:
        finish(start(checkpoints[present], folder, names, tmp_path / "log"))
    if what == "build":
        with folders.updated(folder) as manifest:
            manifest.engines = []
    script, places = HELPERS / "killed_export.py", (folder, tmp_path / "work")
    done = subprocess.run(
        [sys.executable, script, what, *places, names, checkpoints[1], checkpoints[0]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    within = [kill for kill in kills if kill["in_commit"]]
    assert len(within) >= 20, "kills that land inside a commit"
    assert {kill["change"] for kill in within} >= {"rename", "fsync", "mkdir"}
    assert len(kills) > len(within), "and outside one"
    assert {kill["after"] for kill in kills} == outcomes


def test_who_waited_for_another_checkpoint_replaces_it_whole(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """It looked before it waited; what it saw then is no longer there."""
    folder, other, log = tmp_path / "artifacts", tmp_path / "other", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    finish(start(checkpoints[1], other, "fp32", log))
    theirs = weights_of(other)
    with files.locked(folder, f"{files.LOCK}-exports"):
        waiting = start(checkpoints[2], folder, "fp32", log)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1.5)
        shutil.copytree(other, folder, dirs_exist_ok=True)
        assert weights_of(folder) == theirs
    finish(waiting)
    assert weights_of(folder) == files.sha256(checkpoints[2] / "model.safetensors")
    require_whole(folder, "fp32")


def test_two_who_replace_the_same_share_the_result(checkpoints: list[Path], tmp_path: Path) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    log.unlink()
    for process in [start(checkpoints[1], folder, "fp32", log) for _ in range(2)]:
        finish(process)
    done = Counter(line.rsplit(" ", 1)[0] for line in log.read_text().splitlines())
    assert len(done) == len(components()) + len(compiled())
    assert set(done.values()) == {1}, "nothing was made twice"


def test_two_builds_of_the_same_thing_share_the_result(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    both = [start(checkpoints[0], folder, "fp32,fp16", log) for _ in range(2)]
    for process in both:
        finish(process)
    weights_of(folder)
    done = Counter(line.rsplit(" ", 1)[0] for line in log.read_text().splitlines())
    assert len(done) == 2 * (len(components()) + len(compiled()))
    assert set(done.values()) == {1}, "nothing was made twice"


def test_builds_of_different_things_run_side_by_side(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "bf16", log))
    with files.locked(folder, f"{files.LOCK}-fp32-denoiser"):
        other = start(checkpoints[0], folder, "fp16", log)
        finish(other)  # does not wait for whoever exports fp32
        same = start(checkpoints[0], folder, "fp32", log)
        with pytest.raises(subprocess.TimeoutExpired):
            same.wait(timeout=1.5)
    finish(same)
    assert folders.load(folder).precisions() == ["bf16", "fp16", "fp32"]


def test_a_folder_that_was_given_to_another_checkpoint_is_left_alone(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """Whoever adds to it when another checkpoint takes it stops, and changes nothing."""
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    with files.locked(folder, f"{files.LOCK}-fp16-latent_decoder"):
        adding = start(checkpoints[0], folder, "fp16", log, stderr=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            adding.wait(timeout=1.5)
        finish(start(checkpoints[1], folder, "fp32", log))
        theirs = weights_of(folder)
    _, said = adding.communicate(timeout=60)
    assert adding.returncode == 1
    assert b"given to another checkpoint during the export" in said
    assert weights_of(folder) == theirs
    assert folders.load(folder).precisions() == ["fp32"]


def test_files_that_somebody_reads_are_left_to_gc(checkpoints: list[Path], tmp_path: Path) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    with folders.reading(folder) as manifest:
        finish(start(checkpoints[1], folder, "fp32", log))
        for entry in manifest.graphs:
            entry.verified(folder)
        assert folders.load(folder).checkpoint != manifest.checkpoint
    assert {item.path.relative_to(folder).as_posix() for item in leftovers(folder)} >= {
        entry.graph.path for entry in manifest.graphs
    }
    require_tidy(folder)
    with folders.reading(folder) as manifest:
        pass
    finish(start(checkpoints[0], folder, "fp32", log))
    assert not any((folder / path).exists() for path in manifest.listed())


def test_gc_waits_for_readers(checkpoints: list[Path], tmp_path: Path) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    with ThreadPoolExecutor(1) as pool:
        with folders.reading(folder):
            waiting = pool.submit(collect, folder)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.5)
        assert waiting.result(timeout=10) == []


def test_artifacts_of_an_older_version_are_made_again(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """They stay until all new files are there, and gc knows them."""
    folder = tmp_path / "artifacts"
    old = {
        "onnx/fp32/denoiser.onnx", "onnx/fp32/denoiser.onnx.data",
        "engines/fp32/rtx/denoiser.engine", "tokenizer.json",
    }  # fmt: skip # rows, as a table
    for name in old:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"old")
    manifest = '{"schema": 2, "name": "older"}'
    (folder / "manifest.json").write_text(manifest)
    for command in (folders.load, leftovers, collect):
        with pytest.raises(ArtifactError, match=r"older version[\s\S]*export again"):
            command(folder)
    (folder / "onnx" / "fp32" / "latent_decoder-x").write_text("in the way")
    finish(start(checkpoints[0], folder, "fp32", tmp_path / "log"))
    weights_of(folder)
    assert all((folder / name).exists() for name in old)
    found = {item.path.relative_to(folder).as_posix() for item in collect(folder)}
    assert found == old
    assert not any((folder / name).exists() for name in old)
    assert (folder / "onnx" / "fp32" / "latent_decoder-x").exists()


LINKS = ("onnx", "engines", "onnx/fp32", "tokenizer-0", ".partial-999999999-x", ".lock")


@pytest.mark.parametrize("name", LINKS)
def test_what_writes_moves_or_deletes_refuses_links(
    checkpoints: list[Path], tmp_path: Path, name: str
) -> None:
    folder, decoy, log = tmp_path / "artifacts", tmp_path / "decoy", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    link = folder / name
    if link.is_dir():
        link.rename(decoy)
    else:
        link.unlink(missing_ok=True)
        decoy.mkdir()
        (decoy / "mine.onnx").write_text("years of work")
    link.symlink_to(decoy)
    before = state(tmp_path)
    for precisions, checkpoint in (("fp16", checkpoints[0]), ("fp32", checkpoints[1])):
        refused = start(checkpoint, folder, precisions, log, stderr=subprocess.PIPE)
        assert b"is a link" in refused.communicate(timeout=60)[1]
        assert refused.returncode == 1
    for command in (collect, leftovers, lambda path: drop(path, "fp32", delete=True)):
        with pytest.raises(ArtifactError, match="is a link"):
            command(folder)
    assert state(tmp_path) == before


def test_reading_changes_nothing(checkpoints: list[Path], tmp_path: Path) -> None:
    """Whatever it finds: a dead process's folder, links, files of nobody, no lock."""
    folder = tmp_path / "artifacts"
    finish(start(checkpoints[0], folder, "fp32", tmp_path / "log"))
    for lock in folder.glob(".lock*"):
        lock.unlink()
    (folder / ".partial-999999999-x").mkdir()
    (folder / "onnx" / "stray.onnx").symlink_to(tmp_path / "nowhere")
    before = state(tmp_path)
    with folders.reading(folder) as manifest:
        for entry in manifest.graphs:
            entry.verified(folder)
    describe(folder)
    describe(folder / manifest.engines[0].engine.path)
    with pytest.raises(ArtifactError, match="is a link"):
        leftovers(folder)
    assert state(tmp_path) == before


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path, with its inode and its times of change."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in found.items()}
