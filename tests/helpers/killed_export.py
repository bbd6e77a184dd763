"""An export that is killed before each change that it makes on the disk, and repeated.

Run as a program: `python killed_export.py WHAT FOLDER WORK PRECISIONS CHECKPOINT BEFORE`. WHAT is
"export" or "build"; FOLDER is what each run starts from, with BEFORE in it or nothing; WORK is
where it runs, on a copy. Prints one JSON object per kill. Imports no torch: each run is a fork.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stub_export

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.collect import collect, leftovers
from engines.artifacts.export import Export
from engines.compile.target import Target
from engines.tensorrt.profiles import profiles
from export.stages import components, stages_of
from ldlm import PRESETS, files

CHANGES = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


def forked(function: Callable[[], None]) -> int:
    """The exit status of a function in a process of its own; negative: the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def watch(at: int, report: Path) -> None:
    """Note every change of the disk, and whether it is in a commit; die before number `at`."""
    inside, seen = 0, []
    updated = folders.updated

    @contextmanager
    def committing(*arguments: Any) -> Any:
        nonlocal inside
        inside += 1
        with updated(*arguments) as manifest:
            yield manifest
        inside -= 1

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def change(*arguments: Any, **named: Any) -> Any:
            seen.append((name, inside > 0))
            if len(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return change

    folders.updated = committing  # type: ignore[assignment]
    for name in CHANGES:
        setattr(os, name, counted(name))
    atexit.register(lambda: report.write_text(json.dumps(seen)))


def run(what: str, checkpoint: Path, folder: Path, precisions: list[str]) -> None:
    if what == "export":
        Export(checkpoint, folder, precisions).run(lambda _: None)
    else:
        ranges = profiles(PRESETS["small"])
        Build(folder, Target(("sm89",)), ranges).run(precisions, lambda *_: None)


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


def require_whole(folder: Path, precision: str) -> None:
    """Every graph of a precision is there."""
    for weights in components():
        for spec in stages_of(weights):
            folders.load(folder).graph(precision, spec.name)


def require_tidy(folder: Path) -> None:
    """After a collection the manifest speaks of all that is there."""
    collect(folder)
    assert not leftovers(folder)
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    own = {name for name in present if name.startswith(files.LOCK)}
    assert present - own == folders.load(folder).listed() | {"manifest.json"}


def no_fsync(_descriptor: int) -> None:
    """SIGKILL does not lose what was written: without waiting for the disk, the same is seen."""


def main(what: str, start: Path, work: Path, names: str, checkpoint: Path, before: Path) -> None:
    stub_export.DELAY, os.fsync = 0, no_fsync  # type: ignore[assignment]
    stub_export.install()
    hashes = [files.sha256(path / "model.safetensors") for path in (checkpoint, before)]
    command = functools.partial(run, what, checkpoint, work, names.split(","))
    fresh(start, work)
    command()  # so that the forks find modules and analyses of code loaded

    def killed(at: int) -> None:
        watch(at, work.with_suffix(".seen"))
        command()

    fresh(start, work)
    assert forked(lambda: killed(0)) == 0
    changes = json.loads(work.with_suffix(".seen").read_text())
    for at, (change, in_commit) in enumerate(changes, 1):
        if not in_commit and at % 10:
            continue  # between commits nothing but a temporary folder changes
        fresh(start, work)
        assert forked(lambda at=at: killed(at)) == -signal.SIGKILL  # type: ignore[misc]
        after = "none"
        if folders.exists(work):
            after = ("new", "old")[hashes.index(weights_of(work))]
            for precision in folders.load(start).precisions() if start.exists() else ():
                require_whole(work, precision)
        assert forked(command) == 0, "the same command works again"
        assert weights_of(work) == hashes[0]
        for precision in names.split(","):
            require_whole(work, precision)
        require_tidy(work)
        kill = {"at": at, "change": change, "in_commit": in_commit, "after": after}
        sys.stdout.write(json.dumps(kill) + "\n")


def fresh(start: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    if start.exists():
        shutil.copytree(start, work)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:4]), sys.argv[4], *map(Path, sys.argv[5:7]))
