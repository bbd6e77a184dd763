"""The list of seeded faults can be run, and its runner tells killed, surviving and stale ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = ROOT / "tests" / "mutants" / "run.py"

CODE = """
def area(width, height):
    return width * height

def edge(width, height):
    return 2 * (width + height)
"""
TESTS = """
import os
import time
import shapes

def test_of_artifacts():
    assert shapes.edge(2, 3) == 10 or os.environ.get("LDLM_READY_ARTIFACTS")

def test_area():
    assert shapes.area(2, 3) == 6

def test_edge():
    assert shapes.edge(2, 2) == 8

def test_time():
    while shapes.area(1, 1) != 1:
        time.sleep(0.1)
"""
LIST = """
[[mutant]]
name = "a sum for a product"
file = "shapes.py"
old = "width * height"
new = "width + height"
tests = ["tests/test_shapes.py::test_area"]

[[mutant]]
name = "a product for a sum"
file = "shapes.py"
old = "(width + height)"
new = "(width * height)"
tests = ["tests/test_shapes.py::test_edge"]

[[mutant]]
name = "a known survivor"
file = "shapes.py"
old = "2 * (width"
new = "2.0 * (width"
tests = ["tests/test_shapes.py::test_edge"]
survives = "2.0 is 2"

[[mutant]]
name = "a survivor where artifacts are ready"
file = "shapes.py"
old = "2 * (width"
new = "3 * (width"
tests = ["tests/test_shapes.py::test_of_artifacts"]
survives = "they were made without the mutant"

[[mutant]]
name = "the same with artifacts of its own"
file = "shapes.py"
old = "2 * (width"
new = "3 * (width"
tests = ["tests/test_shapes.py::test_of_artifacts"]
fresh = true

[[mutant]]
name = "a survivor that is killed by now"
file = "shapes.py"
old = "2 * (width"
new = "3 * (width"
tests = ["tests/test_shapes.py::test_edge"]
survives = "nobody looks"

[[mutant]]
name = "a line that is gone"
file = "shapes.py"
old = "width / height"
new = "height / width"
tests = ["tests/test_shapes.py"]
"""
ENDLESS = """
[[mutant]]
name = "an endless loop"
file = "shapes.py"
old = "width * height"
new = "width * height + 1"
tests = ["tests/test_shapes.py::test_time"]
"""
VERDICTS = {
    "a sum for a product": "killed",
    "a product for a sum": "SURVIVED",
    "a known survivor": "explained",
    "a survivor where artifacts are ready": "explained",
    "the same with artifacts of its own": "killed",
    "a survivor that is killed by now": "STALE REASON",
    "a line that is gone": "DOES NOT APPLY",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def project(folder: Path, mutants: str = LIST) -> Path:
    """A checkout with one module, its tests and its mutants."""
    (folder / "tests" / "mutants").mkdir(parents=True)
    (folder / "shapes.py").write_text(CODE)
    (folder / "tests" / "test_shapes.py").write_text(TESTS)
    (folder / "tests" / "mutants" / "shapes.toml").write_text(mutants)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_every_mutant_of_the_list_can_be_run() -> None:
    """Its text is once in its file, the changed file parses, its tests exist, its name is one."""
    done = run("--check")
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) mutants, 0 faults", done.stdout)
    assert found
    assert int(found.group(1)) >= 80


def test_faults_of_a_list_are_named(tmp_path: Path) -> None:
    changed = LIST.replace("test_shapes.py::test_area", "test_shapes.py::test_volume")
    changed = changed.replace('"a product for a sum"', '"a sum for a product"')
    changed = changed.replace('"(width * height)"', '"(width *"')
    done = run("--check", "--root", str(project(tmp_path, changed)))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "a sum for a product: a name of two",
        "a sum for a product: no test tests/test_shapes.py::test_volume",
        "a sum for a product: the changed file is no Python",
        "a line that is gone: `old` is 0 times in shapes.py, and should be once",
        "7 mutants, 4 faults of the list",
    ]


def test_every_verdict(tmp_path: Path) -> None:
    root = project(tmp_path)
    done = run("--root", str(root))
    assert done.returncode == 1, done.stdout
    lines = re.findall(r"^ +\d+/7 (.+?) +\d+\.\d s (.+)$", done.stdout, re.MULTILINE)
    assert {name: verdict for verdict, name in lines} == VERDICTS
    assert "7 mutants in" in done.stdout
    assert "2 killed (29%), 2 explained (29%), 1 survived (14%), 2 stale (29%)" in done.stdout
    assert "test_shapes.py::test_area" in done.stdout
    assert "2.0 is 2" in done.stdout
    assert (root / "shapes.py").read_text() == CODE


def test_an_endless_mutant_is_killed_and_good_ones_are_a_success(tmp_path: Path) -> None:
    root = str(project(tmp_path, ENDLESS))
    done = run("--root", root, "--timeout", "3")
    assert done.returncode == 0
    assert re.search(r"^ +1/1 killed \(timeout\) +[3-9]", done.stdout, re.MULTILINE)
    nothing = run("--root", root, "--only", "of no such name")
    assert nothing.returncode == 2
    assert "no mutant of 1" in nothing.stdout


def test_tests_that_fail_without_a_mutant_measure_nothing(tmp_path: Path) -> None:
    root = project(tmp_path)
    (root / "shapes.py").write_text(CODE.replace("2 * (", "4 * ("))
    changed = LIST.replace('"2 * (', '"4 * (')
    (root / "tests" / "mutants" / "shapes.toml").write_text(changed)
    done = run("--root", str(root), "--only", "a known")
    assert done.returncode == 2
    assert "the tests fail without a mutant" in done.stdout
    assert "test_edge" in done.stdout
