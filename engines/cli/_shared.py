"""What the commands share: consoles, progress, measuring."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich import progress as bars
from rich.console import Console, RenderableType

from engines import memory
from engines.artifacts import folder as folders
from engines.artifacts.ingredients import Decision

# How much is done, at the end of a line of progress.
COUNTS = re.compile(r" \(\d+ of \d+[^)]*\)$")

out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)


def say(text: str, console: Console = out) -> None:
    """One plain line: no markup, so that a path with brackets stays as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def show(document: object, *tables: RenderableType, as_json: bool = False) -> None:
    """Print tables or, in their place, the document that they show, as JSON."""
    if as_json:
        out.print_json(msgspec.json.encode(document).decode())
    else:
        for table in tables:
            out.print(table)


def default_artifacts(checkpoint: Path) -> Path:
    """artifacts/<name of the checkpoint folder>."""
    return Path("artifacts") / checkpoint.resolve().name


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """A function of (what, step=0, steps=None) that says on stderr what is being done.

    On a terminal with the time it takes, and a bar where there are steps; elsewhere one plain line
    for everything new, because a log is no place for a count that moves.
    """
    text = bars.TextColumn("{task.description}", markup=False)
    waiting = (bars.SpinnerColumn(), text, bars.TimeElapsedColumn())
    counting = (text, bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    said: set[str] = set()
    with bars.Progress(*waiting, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, step: int = 0, steps: int | None = None) -> None:
            line = COUNTS.sub("", what)
            if err.is_terminal:
                bar.columns = counting if steps else waiting
                bar.update(task, description=what, completed=step, total=steps)
            elif line not in said:
                said.add(line)
                say(line, err)

        yield tell


@contextlib.contextmanager
def measured(what: str) -> Iterator[dict[str, float]]:
    """Wall seconds and peak resident memory of a block; printed, and in the dict at its end."""
    with memory.measured() as result:
        yield result
    say_measured(what, result)


def say_measured(what: str, run: dict[str, float]) -> None:
    """What a run took, on stderr."""
    say(f"{what}: {run['seconds']} s, peak memory {run['peak_gb']} GB", err)


def record(folder: Path, command: str, decisions: Sequence[Decision], run: dict[str, float]) -> str:
    """Note a run in the manifest, if it made something; one line that says what it did."""
    made = sum(bool(decision.reasons) for decision in decisions)
    if not made:
        return f"nothing has changed, {len(decisions)} kept"
    with folders.updated(folder) as manifest:
        manifest.runs[command] = run
    return f"{made} made, {len(decisions) - made} kept"
