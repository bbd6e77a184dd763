"""docs/faults.md names a test for each kind of fault, and each is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| (\d+) \|.*`(tests/[\w/]+\.py)::(test_\w+)` \|$",
    (ROOT / "docs" / "faults.md").read_text("utf-8"),
    re.MULTILINE,
)


def test_every_kind_of_fault_has_its_test() -> None:
    assert {int(number) for number, *_ in ROWS} == set(range(1, 21))
    for number, path, name in ROWS:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
        assert found, f"{path}::{name}"
        told = ast.get_docstring(found[0]) or ""
        assert re.search(rf"Cases? [\d, and]*\b{number}\b", told), (
            f"{name} does not say case {number}"
        )
