"""What the pages of the documentation tell people to type."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main

from engines.cli import app

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples" / "grammar" / "README.md",
)
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z]+) +\?=", MAKEFILE, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language and its text."""

    page: Path
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"

    def lines(self) -> list[str]:
        """Its commands: continued lines joined, comments left out."""
        joined = self.text.replace("\\\n", " ")
        stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
        return [re.sub(r"\s+", " ", line) for line in stripped if line]


def blocks(language: str) -> list[Block]:
    """All fenced blocks of a language; no page has one without."""
    found = []
    for page in PAGES:
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.M)
        found += [Block(page, number, *fence) for number, fence in enumerate(fences)]
    return [block for block in found if block.language == language]


def lines(first: str) -> list[str]:
    """All commands in blocks that begin with this word."""
    every = [line for block in blocks("bash") for line in block.lines()]
    return [line for line in every if line.split()[0] == first]


def spans(first: str) -> list[str]:
    """Commands in running text, between backquotes; a line may end within one."""
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
        found += [re.sub(r"\s+", " ", span) for span in re.findall(rf"`({first}\s[^`]+)`", text)]
    return found


def parse(line: str) -> None:
    """Parse an `ldlm` line to its end, without running it.

    Raises:
        AssertionError: there is no such command, or an option or argument is wrong or missing.
    """
    _, name, *arguments = shlex.split(line)
    assert name in COMMANDS, f"no such command: {line}"
    try:
        COMMANDS[name].make_context(name, arguments).close()
    except Exception as error:  # the exceptions of the parser inside typer have no public name
        raise AssertionError(f"{line}: {error}") from error


def require_options(line: str) -> None:
    """The command of a shortened `ldlm` line exists, and so do its options."""
    _, name, *arguments = shlex.split(line)
    assert name in COMMANDS or name == "COMMAND", f"no such command: {line}"
    if name in COMMANDS:
        options = {flag for parameter in COMMANDS[name].params for flag in parameter.opts}
        unknown = {word for word in arguments if word.startswith("-")} - options - {"--help"}
        assert not unknown, f"{line}: {unknown}"


def require_targets(line: str) -> None:
    """The targets and variables of a `make` line exist."""
    for word in shlex.split(line)[1:]:
        assert word in TARGETS or word.partition("=")[0] in VARIABLES, f"{line}: {word}"


def require_extras(line: str) -> None:
    """A `pip` line installs this package, with extras that exist."""
    found = re.fullmatch(r"pip install '?\.(?:\[([\w,-]+)\])?'?", line)
    assert found is not None, line
    extras = set(filter(None, (found[1] or "").split(",")))
    assert extras <= set(PROJECT["project"]["optional-dependencies"]), line
