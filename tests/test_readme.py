"""What the README tells people to type exists, and every command is told of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer.main

from engines.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [
    line.split("#")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", "").splitlines()
]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_make_target_exists_and_is_told_of() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) +\?=", makefile, re.MULTILINE))
    used = [shlex.split(line) for line in LINES if line.startswith("make ")]
    assert used
    for _, *words in used:
        for word in words:
            assert word in targets or word.partition("=")[0] in variables, word
    assert targets <= set(re.findall(r"make ([a-z-]+)", README)) | {"help"}


def test_every_ldlm_line_parses() -> None:
    used = [shlex.split(line) for line in LINES if re.match(r"(\.venv/bin/)?ldlm ", line)]
    assert used
    for _, name, *arguments in used:
        command = COMMANDS[name]
        options = {flag for parameter in command.params for flag in parameter.opts}
        given = {word for word in arguments if word.startswith("-")}
        assert given <= options, f"{name}: {given - options}"


def test_every_command_is_told_of() -> None:
    told = {shlex.split(line)[1] for line in LINES if re.match(r"(\.venv/bin/)?ldlm ", line)}
    assert told == set(COMMANDS)


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = project["project"]["dependencies"]
    for extra in project["project"]["optional-dependencies"].values():
        wanted = wanted + extra
    wanted = wanted + project["dependency-groups"]["dev"]
    for requirement in wanted:
        name = re.match(r"[a-z0-9-]+", requirement)
        assert name is not None
        assert f"| {name.group()} |" in README, name.group()


def test_files_speak_of_no_machine() -> None:
    """No path of a developer's machine in what users read."""
    for path in (ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")):
        text = path.read_text("utf-8")
        assert not re.search(r"/(home|root|work|tmp)/", text), path
