"""Fixtures on the `small` preset, made once per session; tests change nothing but decoys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import setup_worker  # noqa: F401  # before anything that starts threads

from engines.artifacts.build import Build
from engines.artifacts.export import Export
from engines.compile.target import Target
from engines.tensorrt.profiles import profiles
from engines.tensorrt.targets import parse_sms
from ldlm import LDLM, PRESETS, files
from ldlm.initialise import initialise
from ldlm.tokenizer import create

# Artifacts of a run before this one, which `tests/mutants/run.py` shares between its mutants.
READY = os.environ.get("LDLM_READY_ARTIFACTS", "")


def copied_from_ready(folder: Path) -> bool:
    """Copy artifacts that are ready, if this run was given any."""
    source = Path(READY) / folder.name
    if not READY or not source.exists():
        return False
    shutil.copytree(source, folder)
    return True


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered between runs is a test's own."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def small() -> LDLM:
    """The small preset, every tensor drawn. Do not change it: copy it."""
    model = initialise(LDLM(PRESETS["small"]).eval(), seed=0)
    model.requires_grad_(False)
    model.tokenizer_json = create(model.config).to_str()
    return model


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all of a run's worker processes see."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def small_checkpoint(small: LDLM, shared: Path) -> Path:
    folder = shared / "checkpoints" / "small"
    with files.locked(shared):
        if not folder.exists():
            small.save_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def small_artifacts(small_checkpoint: Path, shared: Path) -> Path:
    """Graphs in fp32, fp16 and bf16 and their engines. Do not change them: see `own_artifacts`.

    Made once per run, whichever worker comes first.
    """
    folder = shared / "artifacts" / "small"
    with files.locked(shared):
        if not folder.exists() and not copied_from_ready(folder):
            Export(small_checkpoint, folder, ["fp32", "fp16", "bf16"]).run(lambda _: None)
            target = Target(parse_sms("all"), skip_unsupported=True)
            ranges = profiles(PRESETS["small"])
            Build(folder, target, ranges).run(None, lambda *_: None)
    return folder


@pytest.fixture(scope="session")
def int8_artifacts(small_artifacts: Path, small_checkpoint: Path, shared: Path) -> Path:
    """The small artifacts with int8 beside the other precisions. Do not change them."""
    folder = shared / "artifacts" / "small-int8"
    with files.locked(shared):
        if not folder.exists() and not copied_from_ready(folder):
            shutil.copytree(small_artifacts, folder)
            Export(small_checkpoint, folder, ["int8"]).run(lambda _: None)
    return folder


@pytest.fixture
def own_artifacts(small_artifacts: Path, tmp_path: Path) -> Path:
    """A copy of the small artifacts that a test may damage."""
    return Path(shutil.copytree(small_artifacts, tmp_path / "artifacts"))


@pytest.fixture
def own_checkpoint(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may damage."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "checkpoint"))
