"""docs/faults.md names a test for each kind of fault, and each is there and says so by its mark."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (\d+) \|.*`(tests/[\w/]+\.py)::(test_\w+)` \|$",
    (ROOT / "docs" / "faults.md").read_text("utf-8"),
    re.MULTILINE,
)


def marks(path: Path, name: str) -> set[int]:
    """The numbers in a test's `@pytest.mark.fault(...)`."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            calls = [d for d in node.decorator_list if isinstance(d, ast.Call)]
            mine = [call for call in calls if ast.unparse(call.func) == "pytest.mark.fault"]
            return {ast.literal_eval(argument) for call in mine for argument in call.args}
    raise AssertionError(f"{path}::{name} is not there")


def test_every_kind_of_fault_is_listed() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 21))


@pytest.mark.parametrize(("number", "path", "name"), ROWS)
def test_every_kind_of_fault_has_its_test(number: str, path: str, name: str) -> None:
    assert int(number) in marks(ROOT / path, name)
