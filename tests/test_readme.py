"""The documentation as text: it names what exists, all of it, and stays short."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import (
    COMMANDS,
    PAGES,
    PROJECT,
    ROOT,
    TARGETS,
    lines,
    parse,
    require_extras,
    require_options,
    require_targets,
    spans,
)

README = (ROOT / "README.md").read_text("utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text("utf-8")


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 150


def test_every_make_target_exists_and_is_documented() -> None:
    assert lines("make")
    for line in lines("make") + spans("make"):
        require_targets(line)
    assert {line.split()[1] for line in lines("make") if len(line.split()) > 1} >= TARGETS


def test_every_extra_exists() -> None:
    assert lines("pip")
    for line in lines("pip"):
        require_extras(line)


def test_every_ldlm_line_parses() -> None:
    assert lines("ldlm")
    for line in lines("ldlm"):
        parse(line)
    assert spans("ldlm")
    for span in spans("ldlm"):
        require_options(span)


def test_every_command_is_documented() -> None:
    assert {line.split()[1] for line in lines("ldlm")} == set(COMMANDS)
    readme = set(re.findall(r"^ldlm (\w+)", README, re.MULTILINE))
    assert readme == set(COMMANDS), "the README has a line for every command"


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (parse, "ldlm sampel artifacts/base"),
        (parse, "ldlm sample artifacts/base --speed 3"),
        (parse, "ldlm sample artifacts/base --steps many"),
        (parse, "ldlm verify artifacts/base"),
        (require_options, "ldlm verify --taps --tips"),
        (require_targets, "make engine"),
        (require_targets, "make engines CHECKPIONT=checkpoints/mine"),
        (require_extras, "pip install '.[bild]'"),
    ],
)
def test_a_wrong_line_is_noticed(check: Callable[[str], None], line: str) -> None:
    with pytest.raises(AssertionError):
        check(line)


def test_every_dependency_has_its_reason_and_no_other() -> None:
    wanted = {
        "base": PROJECT["project"]["dependencies"],
        **{f"[{n}]": r for n, r in PROJECT["project"]["optional-dependencies"].items()},
        "dev": PROJECT["dependency-groups"]["dev"],
    }
    tables = dict(re.findall(r"^\| (\S+) \| why \|\n\|---\|---\|\n((?:\|.*\n)+)", INSTALL, re.M))
    assert set(tables) == set(wanted)
    for extra, requirements in wanted.items():
        names = {re.match(r"[a-z0-9-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]
        assert names == set(re.findall(r"^\| ([a-z0-9-]+) \| \S", tables[extra], re.M)), extra


def test_every_link_leads_somewhere() -> None:
    found = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"
            found += 1
    assert found > 30


def test_the_map_of_the_code_has_every_room() -> None:
    drawn = README[README.index("## Map of the code") :]
    rooms = [path.parent.name for path in (ROOT / "engines").glob("*/__init__.py")]
    assert rooms
    assert [room for room in rooms if f"{room}/" not in drawn] == []


def test_files_speak_of_no_machine() -> None:
    """No path of a developer's machine in what users read."""
    for path in (*PAGES, ROOT / "Makefile"):
        assert not re.search(r"/(home|root|work|tmp)/", Path(path).read_text("utf-8")), path
