"""Apply each seeded fault alone to a copy of the checkout, and see whether a test fails.

The faults are data: `tests/mutants/*.toml`, one table `[[mutant]]` each, with

    name      what is wrong, in words
    file      the file that is changed
    old, new  text that is once in the file, and what takes its place
    tests     files or node ids of pytest, the narrowest that should fail
    survives  of a survivor alone: the reason why no test can fail
    fresh     true, if its tests need artifacts that the changed code has exported: minutes. All
              others get those of the run without a mutant, and name no test that compares these
              with what the changed code exports or computes

and before them a list `preload` of libraries that take seconds to import, for speed alone; plugins
of pytest cannot be among them.

Exit status: 0, if every mutant is killed or explained; 1, if one survives without a reason, does
not apply, or is killed although it is explained; 2, if nothing could be measured.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).parents[2]
LISTS = Path("tests", "mutants")
TIMEOUT = 300.0  # seconds for the tests of one mutant
QUICK = "not base and not long and not gpu"  # what `make test` runs
KILLED, TIMED_OUT, EXPLAINED = "killed", "killed (timeout)", "explained"
SURVIVED, STALE, BROKEN = "SURVIVED", "STALE REASON", "DOES NOT APPLY"
FORK = multiprocessing.get_context("fork")
GOOD = (KILLED, TIMED_OUT, EXPLAINED)

console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)


class NothingMeasuredError(Exception):
    """The run says nothing about any mutant."""


@dataclass(frozen=True)
class Mutant:
    """One seeded fault; see the head of this file."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the tests of one mutant said.

    Attributes:
        status: of pytest; None at a timeout.
        failed: the first test that failed.
        text: pytest's last lines.
    """

    status: int | None
    seconds: float
    failed: str
    text: str


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    mutant: Mutant
    verdict: str
    seconds: float = 0.0
    by: str = ""


def read(folder: Path) -> list[Mutant]:
    """All mutants of a folder's lists, in order."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for fields in tomllib.loads(path.read_text("utf-8"))["mutant"]:
            found.append(Mutant(**{**fields, "tests": tuple(fields["tests"])}))
    return found


def faults_of(mutant: Mutant, root: Path) -> list[str]:
    """Why a mutant cannot be run; empty if it can."""
    path = root / mutant.file
    if not path.is_file():
        return [f"no file {mutant.file}"]
    text = path.read_text("utf-8")
    faults = []
    if (times := text.count(mutant.old)) != 1:
        faults.append(f"`old` is {times} times in {mutant.file}, and should be once")
    elif mutant.new == mutant.old:
        faults.append("`new` is `old`")
    elif not _parses(text.replace(mutant.old, mutant.new)):
        faults.append("the changed file is no Python")
    faults += [f"no test {test}" for test in mutant.tests if not _is_test(test, root)]
    return faults if mutant.tests else [*faults, "it names no tests"]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _is_test(test: str, root: Path) -> bool:
    """Whether a file of tests is there, and has a function of the node id's name."""
    file, _, node = test.partition("::")
    if not (root / file).is_file():
        return False
    name = re.escape(node.partition("[")[0].rpartition("::")[2])
    found = re.search(rf"^\s*def {name}\(", (root / file).read_text("utf-8"), re.MULTILINE)
    return not node or found is not None


def preload(folder: Path) -> None:
    """Import what the lists name as slow and changed by no mutant, once for all child processes."""
    lists = [tomllib.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.toml"))]
    for name in (name for found in lists for name in found.get("preload", ())):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)


def _in_child(folder: Path, environment: dict[str, str], output: Path, options: list[str]) -> None:
    """Run pytest in a copy, in a process group of its own; the exit status is pytest's."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [str(folder), *(path for path in sys.path if path != sys.path[0])]
    sys.dont_write_bytecode = True
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    sys.exit(int(pytest.main(options)))


class Copy:
    """A copy of a checkout's files in a temporary folder, where mutants are applied.

    Its compiled files are compared by content: two mutants of one size within one second would
    look alike by time and size.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._first, self._base = folder / "first", folder / "pytest"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True).stdout
        for name in sorted({n for n in os.fsdecode(names).split("\0") if (root / n).is_file()}):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        compiled = ["-m", "compileall", "-qq", "--invalidation-mode", "checked-hash", "."]
        self._python(*compiled, check=False)
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"

    def require_imported(self, files: Sequence[str]) -> None:
        """Tests in the copy import its modules, and not those of an installed checkout."""
        modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
        code = (
            "import importlib.util, sys\n"
            "for name in sys.argv[1:]: print(importlib.util.find_spec(name).origin)"
        )
        found = self._python("-c", code, *modules).splitlines()
        for file, origin in zip(modules.values(), found, strict=True):
            if Path(origin).resolve() != (self.folder / file).resolve():
                raise NothingMeasuredError(f"{origin} is imported and not the copy of {file}")

    @contextlib.contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        """While this holds, the fault is in the copy."""
        path = self.folder / mutant.file
        text = path.read_bytes()
        changed = text.replace(mutant.old.encode(), mutant.new.encode())
        path.write_bytes(changed)
        try:
            yield
            if path.read_bytes() != changed:
                raise NothingMeasuredError(f"{mutant.name}: a test has changed {mutant.file}")
        finally:
            path.write_bytes(text)

    def run_unchanged(self, tests: Sequence[str]) -> Outcome:
        """Run tests without a mutant, and keep the artifacts that they made."""
        return self._run(tests, None, self._first, self.environment)

    def run(self, mutant: Mutant, limit: float) -> Outcome:
        """Run the tests of a mutant, the artifacts ready if they may be."""
        ready = {} if mutant.fresh else {"LDLM_READY_ARTIFACTS": str(self._first / "artifacts")}
        with self._mutated(mutant):
            return self._run(mutant.tests, limit, self._base, self.environment | ready)

    def _run(
        self, tests: Sequence[str], limit: float | None, base: Path, environment: dict[str, str]
    ) -> Outcome:
        """Run tests up to the first that fails; what they started ends with them."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", "--color=no"]
        options += ["-m", QUICK, f"--basetemp={base}", *tests]
        output = base.with_suffix(".txt")
        began = time.monotonic()
        process = FORK.Process(target=_in_child, args=(self.folder, environment, output, options))
        process.start()
        try:
            ended = multiprocessing.connection.wait([process.sentinel], limit)
        finally:
            # Not yet waited for, so that the number of the group is still its own.
            with contextlib.suppress(ProcessLookupError):
                if process.pid is not None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
        status = process.exitcode if ended else None
        text = output.read_text("utf-8", "replace")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
        name = failed.group(1) if failed else ""
        return Outcome(status, time.monotonic() - began, name, "\n".join(text.splitlines()[-15:]))

    def _python(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise NothingMeasuredError(done.stderr)
        return done.stdout


def judged(mutant: Mutant, outcome: Outcome) -> Row:
    """The verdict on one mutant.

    Raises:
        NothingMeasuredError: pytest itself failed, or ran no test.
    """
    if outcome.status in (3, 4, 5):
        raise NothingMeasuredError(f"{mutant.name}: pytest ran no test\n{outcome.text}")
    if outcome.status == 0:
        return Row(mutant, EXPLAINED if mutant.survives else SURVIVED, outcome.seconds)
    by = outcome.failed or ("" if outcome.status is None else f"exit status {outcome.status}")
    if mutant.survives:
        return Row(mutant, STALE, outcome.seconds, by)
    return Row(mutant, TIMED_OUT if outcome.status is None else KILLED, outcome.seconds, by)


def measure(mutants: Sequence[Mutant], root: Path, timeout: float) -> Iterator[Row]:
    """Every mutant's row, as soon as it is known.

    Raises:
        NothingMeasuredError: the tests fail without any mutant, or see another checkout.
    """
    broken = {mutant: faults for mutant in mutants if (faults := faults_of(mutant, root))}
    ready = [mutant for mutant in mutants if mutant not in broken]
    yield from (Row(mutant, BROKEN, by="; ".join(faults)) for mutant, faults in broken.items())
    if not ready:
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(root, Path(folder).resolve())
        copy.require_imported(sorted({mutant.file for mutant in ready}))
        preload(root / LISTS)
        tests = sorted({test for mutant in ready for test in mutant.tests})
        outcome = copy.run_unchanged(tests)
        if outcome.status != 0:
            raise NothingMeasuredError(f"the tests fail without a mutant\n{outcome.text}")
        console.print(f"without a mutant, the tests pass in {outcome.seconds:.0f} s")
        for mutant in ready:
            yield judged(mutant, copy.run(mutant, timeout))


def report(rows: Sequence[Row], seconds: float) -> None:
    """The table, and the shares."""
    table = Table("mutant", "verdict", "s", "killed by, or why not", box=None)
    for row in rows:
        style = "" if row.verdict in GOOD else "red"
        reason = (row.mutant.survives if row.verdict == EXPLAINED else row.by) or ""
        cells = (row.mutant.name, row.verdict, f"{row.seconds:.1f}", reason)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells), style=style)
    console.print(table)
    counts = {
        "killed": sum(row.verdict in (KILLED, TIMED_OUT) for row in rows),
        "explained": sum(row.verdict == EXPLAINED for row in rows),
        "survived": sum(row.verdict == SURVIVED for row in rows),
        "stale": sum(row.verdict in (STALE, BROKEN) for row in rows),
    }
    shares = ", ".join(f"{n} {what} ({n / len(rows):.0%})" for what, n in counts.items())
    console.print(f"{len(rows)} mutants in {seconds:.0f} s: {shares}")


def check(mutants: Sequence[Mutant], root: Path) -> int:
    """Whether the whole list could be run; runs nothing."""
    names = [mutant.name for mutant in mutants]
    faults = [f"{name}: a name of two" for name in sorted(set(names)) if names.count(name) > 1]
    faults += [f"{mutant.name}: {fault}" for mutant in mutants for fault in faults_of(mutant, root)]
    for fault in faults:
        console.print(fault, soft_wrap=True, markup=False)
    console.print(f"{len(mutants)} mutants, {len(faults)} faults of the list")
    return int(bool(faults) or not mutants)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="a part of the names or files to choose")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a mutant")
    parser.add_argument("--check", action="store_true", help="look at the list and run nothing")
    options = parser.parse_args()
    mutants = read(options.root / LISTS)
    if options.check:
        return check(mutants, options.root)
    chosen = [m for m in mutants if options.only in m.name or options.only in m.file]
    if not chosen:
        console.print(f"no mutant of {len(mutants)} has this in its name: {options.only}")
        return 2
    began, rows = time.monotonic(), []
    try:
        for row in measure(chosen, options.root.resolve(), options.timeout):
            rows.append(row)
            line = f"{len(rows):>4}/{len(chosen)} {row.verdict:<17}{row.seconds:6.1f} s "
            console.print(line + row.mutant.name, soft_wrap=True, markup=False)
    except NothingMeasuredError as error:
        console.print(f"nothing is measured: {error}", soft_wrap=True, markup=False)
        return 2
    report(rows, time.monotonic() - began)
    return int(any(row.verdict not in GOOD for row in rows))


if __name__ == "__main__":
    sys.exit(main())
