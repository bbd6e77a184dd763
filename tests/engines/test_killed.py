"""Builds that are killed, and builds that run at once: the old artifact or the new one, whole."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import stub_export

from engines.artifacts import folder as folders
from engines.artifacts import manifest as manifests
from engines.artifacts.collect import collect, leftovers
from export.stages import COMPILED, DEPLOYED, sharing
from ldlm import LDLM, PRESETS, files
from ldlm.initialise import initialise

HELPERS = Path(stub_export.__file__).parent
KILLS = 30


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one architecture."""
    folders = []
    for seed in (0, 1):
        folders.append(tmp_path_factory.mktemp("checkpoints") / f"seed{seed}")
        initialise(LDLM(PRESETS["small"]), seed).save_checkpoint(folders[-1])
    return folders


def start(checkpoint: Path, folder: Path, precisions: str, log: Path) -> subprocess.Popen[bytes]:
    script = HELPERS / "stub_export.py"
    return subprocess.Popen([sys.executable, script, checkpoint, folder, precisions, log])


def graphs_in(precision: str) -> int:
    return sum(len(sharing(weights, precision)) for weights in DEPLOYED)


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=60) == 0


def weights_of(folder: Path) -> str:
    """The checkpoint that every file of the folder is of; fails on any that is torn or mixed."""
    manifest = folders.load(folder)
    for entry in manifest.graphs:
        entry.verified(folder)
        assert entry.made_from["weights"] == manifest.checkpoint
        name = Path(entry.graph.path).name
        expected = stub_export.content(manifest.checkpoint, entry.precision, name)
        assert (folder / entry.graph.path).read_bytes() == expected
    for engine in manifest.engines:
        engine.engine.verified(folder)
        assert engine.is_of(manifest.graph(engine.precision, engine.stage))
    return manifest.checkpoint


def test_killed_at_thirty_moments(checkpoints: list[Path], tmp_path: Path) -> None:
    """Each run would replace the other checkpoint's artifacts and is killed on the way."""
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    began = time.perf_counter()
    finish(start(checkpoints[0], folder, "fp32,fp16", log))
    whole = time.perf_counter() - began
    hashes = [files.sha256(path / "model.safetensors") for path in checkpoints]
    assert weights_of(folder) == hashes[0]
    dice = random.Random(4)
    outcomes: Counter[str] = Counter()
    for number in range(KILLS):
        before = weights_of(folder)
        wanted = 1 - hashes.index(before)
        process = start(checkpoints[wanted], folder, "fp32,fp16", log)
        # Most of a run is the start of Python: look at what comes after.
        time.sleep(whole * dice.uniform(0.4, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        after = weights_of(folder)
        assert after in (before, hashes[wanted]), number
        graphs = folders.load(folder).graphs
        assert len(graphs) == graphs_in("fp32") + graphs_in("fp16"), (
            "all stages and precisions of one checkpoint"
        )
        outcomes["new" if after != before else "old"] += 1
    assert sum(outcomes.values()) == KILLS
    finish(start(checkpoints[1], folder, "fp32,fp16", log))
    assert weights_of(folder) == hashes[1]
    assert len(folders.load(folder).engines) == 2 * len(COMPILED)
    collect(folder)
    assert not leftovers(folder)
    print(dict(outcomes))  # noqa: T201


def test_a_commit_that_was_cut_is_finished(checkpoints: list[Path], tmp_path: Path) -> None:
    """Killed between the moment of the commit and the last move: the next reader goes on."""
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    manifest = folders.load(folder)
    manifest.runs["marker"] = {"seconds": 1.0}
    cut = folder / files.COMMIT
    (cut / "onnx" / "fp32").mkdir(parents=True)
    (cut / "onnx" / "fp32" / "extra.onnx").write_bytes(b"new")
    (cut / manifests.MANIFEST).write_bytes(manifest.to_json())
    assert "marker" in folders.load(folder).runs
    assert (folder / "onnx" / "fp32" / "extra.onnx").read_bytes() == b"new"
    assert not cut.exists()


def dying_after(moves: int) -> Callable[[Path, Path], Path]:
    """Path.replace for a process that dies after so many moves of a commit."""
    move, left = Path.replace, iter(range(moves))

    def replace(path: Path, target: Path) -> Path:
        if files.COMMIT in path.parts and next(left, None) is None:
            raise KeyboardInterrupt
        return move(path, target)

    return replace


def test_a_first_commit_cut_at_every_move(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an empty folder, where no older manifest says that it is ours."""
    for cut in range(12):
        folder, log = tmp_path / f"artifacts{cut}", tmp_path / "log"
        with monkeypatch.context() as patch:
            for name in ("export.exporter", "ldlm.model", "engines.compile.rtx"):
                patch.setitem(sys.modules, name, sys.modules.get(name))
            stub_export.install()
            patch.setattr(Path, "replace", dying_after(cut))
            with contextlib.suppress(KeyboardInterrupt):
                stub_export.run(checkpoints[0], folder, ["fp32"])
        finish(start(checkpoints[0], folder, "fp32", log))
        weights_of(folder)
        assert len(folders.load(folder).graphs) == graphs_in("fp32")


def test_who_waited_for_another_checkpoint_replaces_it_whole(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """It looked before it waited; what it saw then is no longer there."""
    folder, other, log = tmp_path / "artifacts", tmp_path / "other", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    finish(start(checkpoints[1], other, "fp32", log))
    theirs = weights_of(other)
    with files.locked(folder, f"{files.LOCK}-exports"):
        waiting = start(checkpoints[0], folder, "fp32", log)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=1.5)
        for name in ("onnx", "engines"):
            shutil.rmtree(folder / name)
            shutil.copytree(other / name, folder / name)
        shutil.copy(other / manifests.MANIFEST, folder)
        assert weights_of(folder) == theirs
    finish(waiting)
    assert weights_of(folder) != theirs
    assert len(folders.load(folder).graphs) == graphs_in("fp32")


def test_two_builds_of_the_same_thing_share_the_result(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    both = [start(checkpoints[0], folder, "fp32,fp16", log) for _ in range(2)]
    for process in both:
        finish(process)
    weights_of(folder)
    done = Counter(line.rsplit(" ", 1)[0] for line in log.read_text().splitlines())
    assert len(done) == 2 * (len(DEPLOYED) + len(COMPILED))
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


def test_another_checkpoint_waits_for_all_who_export(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    finish(start(checkpoints[0], folder, "fp32", log))
    with files.locked(folder, f"{files.LOCK}-exports", shared=True):
        other = start(checkpoints[1], folder, "fp32", log)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=1.5)
        before = weights_of(folder)
    finish(other)
    assert weights_of(folder) != before
