"""Fixtures on the `small` preset, made once per session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.artifacts import build_artifacts
from engines.compile.targets import parse_sms, profile
from ldlm import LDLM, PRESETS
from ldlm.initialise import initialise
from ldlm.tokenizer import create


@pytest.fixture(scope="session")
def small() -> LDLM:
    """The small preset, every tensor drawn. Do not change it: copy it."""
    model = initialise(LDLM(PRESETS["small"]).eval(), seed=0)
    model.requires_grad_(False)
    model.tokenizer_json = create(model.config).to_str()
    return model


@pytest.fixture(scope="session")
def small_checkpoint(small: LDLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    small.save_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def small_artifacts(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs in fp32, fp16 and bf16 and their engines. Do not change them: see `own_artifacts`.

    Two processes export into one folder at once, as users may.
    """
    folder = tmp_path_factory.mktemp("artifacts") / "small"
    code = "from engines.cli import main; main()"
    command = [sys.executable, "-c", code, "export", str(small_checkpoint), "--out", str(folder)]
    jobs = [
        subprocess.Popen([*command, "--precision", precision], stderr=subprocess.PIPE)
        for precision in ("fp32", "fp16,bf16")
    ]
    for job in jobs:
        _, errors = job.communicate()
        assert job.returncode == 0, errors.decode()
    build_artifacts(
        folder,
        None,
        parse_sms("all"),
        profile(PRESETS["small"]),
        skip_unsupported=True,
        progress=lambda *_: None,
    )
    return folder


@pytest.fixture
def own_artifacts(small_artifacts: Path, tmp_path: Path) -> Path:
    """A copy of the small artifacts that a test may damage."""
    return Path(shutil.copytree(small_artifacts, tmp_path / "artifacts"))


@pytest.fixture
def own_checkpoint(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint that a test may damage."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "checkpoint"))
