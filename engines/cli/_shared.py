"""What the commands share: consoles, progress, measuring, list options."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from engines import memory
from engines.artifacts import folder as folders
from engines.artifacts.ingredients import Decision
from ldlm.errors import ConfigError

# What most commands take.
ArtifactsFolder = Annotated[Path, typer.Argument(help="Artifacts folder.")]
CheckpointFolder = Annotated[Path, typer.Argument(help="Checkpoint folder.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="Artifacts folder; default artifacts/<name>.")
]

# How much is done, at the end of a line of progress.
COUNTS = re.compile(r" \(\d+ of \d+[^)]*\)$")

EXPLAIN = "Say of every file whether it was made, and why."

out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)


def say(text: str) -> None:
    """One plain line on stdout: no markup, so that a path with brackets stays as it is."""
    out.print(text, highlight=False, markup=False)


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [item for item in (part.strip() for part in text.split(",")) if item]


def precisions(text: str) -> list[str]:
    """A comma-separated list of precisions, at least one.

    Raises:
        ConfigError: it is empty.
    """
    found = list(dict.fromkeys(names(text)))
    if not found:
        raise ConfigError("no precision given", expected="such as fp32,fp16", got=repr(text))
    return found


def numbers(text: str | None, option: str) -> list[int] | None:
    """Three comma-separated integers, or None.

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return None
    try:
        values = [int(item) for item in names(text)]
    except ValueError:
        values = []
    if len(values) != 3:
        raise ConfigError(f"{option} is not usable", expected="MIN,OPT,MAX", got=text)
    return values


def default_artifacts(checkpoint: Path) -> Path:
    """artifacts/<name of the checkpoint folder>."""
    return Path("artifacts") / checkpoint.resolve().name


@contextlib.contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Says on stderr what is being done and for how long; where piped, a line for what is new."""
    if not err.is_terminal:
        known: set[str] = set()

        def say_new(text: str) -> None:
            what = COUNTS.sub("", text)  # a log is no place for a count that moves
            if what not in known:
                known.add(what)
                err.print(text, highlight=False, markup=False, soft_wrap=True)

        yield say_new
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)


@contextlib.contextmanager
def steps() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for (what, step, steps); where piped, a plain line for every new thing."""
    if not err.is_terminal:
        said: set[str] = set()

        def say_once(text: str, _step: int, _total: int) -> None:
            what = text.partition(":")[0]
            if what not in said:
                said.add(what)
                err.print(what, highlight=False, markup=False)

        yield say_once
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text, step, total: bar.update(
            task, description=text, completed=step, total=total
        )


@contextlib.contextmanager
def measured(what: str) -> Iterator[dict[str, float]]:
    """Wall seconds and peak resident memory of a block; printed, and in the dict at its end."""
    with memory.measured() as result:
        yield result
    err.print(f"{what}: {result['seconds']} s, peak memory {result['peak_gb']} GB", highlight=False)


def record(folder: Path, command: str, decisions: Sequence[Decision], run: dict[str, float]) -> str:
    """Note a run in the manifest, if it made something; one line that says what it did."""
    made = sum(bool(decision.reasons) for decision in decisions)
    if not made:
        return f"nothing has changed, {len(decisions)} kept"
    with folders.updated(folder) as manifest:
        manifest.runs[command] = run
    return f"{made} made, {len(decisions) - made} kept"
