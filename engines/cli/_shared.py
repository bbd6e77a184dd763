"""What the commands share: consoles, progress, measuring, lists."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engines import memory
from engines.artifacts import folder as folders
from engines.artifacts.ingredients import Decision
from ldlm.errors import ConfigError

# How much is done, at the end of a line of progress.
COUNTS = re.compile(r" \(\d+ of \d+[^)]*\)$")

out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)


def say(text: str) -> None:
    """One plain line on stdout: no markup, so that a path with brackets stays as it is."""
    out.print(text, highlight=False, markup=False)


def tell(text: str) -> None:
    """The same on stderr."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def show(document: object, table: Callable[[], Table], *, as_json: bool) -> None:
    """A document as JSON, or as a table."""
    if as_json:
        out.print_json(msgspec.json.encode(document).decode())
    else:
        out.print(table())


def names(text: str | None) -> list[str] | None:
    """A comma-separated list, or None."""
    return None if text is None else [item for part in text.split(",") if (item := part.strip())]


def precisions(text: str | None) -> list[str] | None:
    """A comma-separated list of precisions, at least one; or None.

    Raises:
        ConfigError: it is empty.
    """
    found = names(text)
    if found == []:
        raise ConfigError("no precision given", expected="such as fp32,fp16", got=repr(text))
    return None if found is None else list(dict.fromkeys(found))


def numbers(text: str | None, option: str, count: int | None = None) -> list[int] | None:
    """Comma-separated integers, or None.

    Args:
        text: what was given.
        option: by which option.
        count: how many there must be: 3 for a range; None is any number.

    Raises:
        ConfigError: it is something else.
    """
    expected = "MIN,OPT,MAX" if count else "such as 64,256"
    try:
        found = [int(item) for item in names(text) or ()]
    except ValueError:
        raise ConfigError(f"{option} is not usable", expected=expected, got=text) from None
    if text is not None and count not in (None, len(found)):
        raise ConfigError(f"{option} is not usable", expected=expected, got=text)
    return None if text is None else found


def default_artifacts(checkpoint: Path) -> Path:
    """artifacts/<name of the checkpoint folder>."""
    return Path("artifacts") / checkpoint.resolve().name


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Say on stderr what is being done, how much of it is done, and for how long.

    Gives a function that takes (what, step, steps), the numbers where they are known. Where stderr
    is piped, every new thing has one plain line: a log is no place for a count that moves.
    """
    known: set[str] = set()

    def log(what: str, _step: int = 0, steps: int | None = None) -> None:
        new = what.partition(":")[0] if steps else COUNTS.sub("", what)
        if new not in known:
            known.add(new)
            tell(new)

    if not err.is_terminal:
        yield log
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None)

        def move(what: str, step: int = 0, steps: int | None = None) -> None:
            text = f"{what}, {step} of {steps}" if steps else what
            bar.update(task, description=text, completed=step, total=steps)

        yield move


@contextlib.contextmanager
def measured(what: str) -> Iterator[dict[str, float]]:
    """Wall seconds and peak resident memory of a block; printed, and in the dict at its end."""
    with memory.measured() as result:
        yield result
    tell_cost(what, result)


def tell_cost(what: str, run: dict[str, float]) -> None:
    """What a run took, on stderr."""
    tell(f"{what}: {run['seconds']} s, peak memory {run['peak_gb']} GB")


def record(folder: Path, command: str, decisions: Sequence[Decision], run: dict[str, float]) -> str:
    """Note a run in the manifest, if it made something; one line that says what it did."""
    made = sum(bool(decision.reasons) for decision in decisions)
    if not made:
        return f"nothing has changed, {len(decisions)} kept"
    with folders.updated(folder) as manifest:
        manifest.runs[command] = run
    return f"{made} made, {len(decisions) - made} kept"
