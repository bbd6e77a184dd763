"""Jobs in worker processes: order, memory, errors as themselves, and nothing left behind."""

from __future__ import annotations

import functools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import work

from engines import memory
from engines.artifacts import folder as folders
from engines.artifacts.export import Export
from engines.artifacts.ingredients import Decision
from engines.artifacts.jobs import Job, run_jobs
from ldlm import errors
from ldlm.errors import ExportError, LDLMError

ERRORS = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]


def silent(*_: object) -> None:
    pass


def noting(log: Path, name: str, size: int = 1, after: tuple[str, ...] = ()) -> Job:
    return Job(name, functools.partial(work.note, log, name, 0.3), size, after)


def most_at_once(log: Path) -> int:
    running, most = 0, 0
    for line in log.read_text().splitlines():
        running += 1 if line.startswith("begins") else -1
        most = max(most, running)
    return most


def test_jobs_run_side_by_side_in_workers(tmp_path: Path) -> None:
    log, said = tmp_path / "log", list[str]()
    jobs = [noting(log, name) for name in "abcd"]
    found = run_jobs(jobs, said.append, workers=2, budget=10)
    assert {name: result[0] for name, result in found.items()} == {name: name for name in "abcd"}
    processes = {result[1] for result in found.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert most_at_once(log) == 2
    assert any(re.fullmatch(r"\w: working; \w: working.*", text) for text in said)
    assert all(len(text.split("; ")) <= 2 for text in said)
    assert re.fullmatch(r"\w: working \(3 of 4, about \d+ s left\)", said[-1])


@pytest.mark.parametrize(("workers", "budget"), [(1, 10), (2, 1)])
def test_where_no_two_can_run_there_are_no_workers(
    tmp_path: Path, workers: int, budget: int
) -> None:
    log = tmp_path / "log"
    jobs = [noting(log, name) for name in "ab"]
    found = run_jobs(jobs, silent, workers=workers, budget=budget)
    assert {result[1] for result in found.values()} == {os.getpid()}
    assert most_at_once(log) == 1


def test_the_budget_is_kept_and_what_is_too_large_runs_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    jobs = [noting(log, "huge", 100), *(noting(log, name, 5) for name in "abcd")]
    run_jobs(jobs, silent, workers=4, budget=10)
    lines = log.read_text().splitlines()
    assert lines.index("ends huge") == lines.index("begins huge") + 1
    assert most_at_once(log) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_comes_after_others(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    jobs = [noting(log, "a"), noting(log, "b", after=("a",)), noting(log, "last", after=("a", "b"))]
    run_jobs(jobs, silent, workers=workers, budget=10)
    assert [line for line in log.read_text().splitlines() if line.startswith("begins")] == [
        "begins a", "begins b", "begins last",
    ]  # fmt: skip # rows, as a table
    for missing in ("nobody", "last", "b"):
        jobs[1] = noting(log, "b", after=("a", missing))
        with pytest.raises(ValueError, match=f"b does not come after {missing}"):
            run_jobs(jobs, silent)


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.artifacts.jobs.cores", lambda: 6)
    found = run_jobs([Job(n, work.threads, 1) for n in "ab"], silent, workers=2, budget=10)
    assert set(found.values()) == {"3"}


def test_the_first_error_arrives_as_itself_and_stops_the_rest(tmp_path: Path) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    jobs = [
        Job("slow", functools.partial(work.stage_slowly, folder), 1),
        Job("bad", functools.partial(work.fail_when_staged, folder), 1),
        noting(log, "never"),
    ]
    folder.mkdir()
    began = time.monotonic()
    with pytest.raises(ExportError, match="it does not work") as caught:
        run_jobs(jobs, silent, workers=2, budget=10)
    assert caught.value.details == {
        "stage": "denoiser", "expected": "1", "got": "2", "remedy": "none",
    }  # fmt: skip # rows, as a table
    assert time.monotonic() - began < 30, "the other job was ended"
    assert list(folder.iterdir()) == [], "and has removed what it had begun"
    assert not log.exists()


def test_strange_errors_and_deaths_are_told() -> None:
    quiet = Job("quiet", work.threads, 1)
    with pytest.raises(RuntimeError, match="StrangeError"):
        run_jobs([Job("odd", work.fail_strangely, 1), quiet], silent, workers=2, budget=10)
    with pytest.raises(LDLMError, match=r"died while it ran last[\s\S]*exit status 9"):
        run_jobs([Job("last", work.die, 1), quiet], silent, workers=2, budget=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_workers_end_with_their_parent(tmp_path: Path, number: int) -> None:
    folder, log = tmp_path / "artifacts", tmp_path / "log"
    folder.mkdir()
    # A shell's background job, as CI may be, is started with SIGINT ignored.
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += f"sys.path.append({str(Path(work.__file__).parent)!r}); import work; "
    script += f"work.main(work.Path({str(folder)!r}), work.Path({str(log)!r}))"
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    while not log.exists() or log.read_text().count("staging") < 2:
        assert parent.poll() is None
        time.sleep(0.02)
    owners = [int(path.name.split("-")[1]) for path in folder.iterdir()]
    parent.send_signal(number)
    assert parent.wait(timeout=60) != 0
    assert list(folder.iterdir()) == []
    for owner in owners:
        with pytest.raises(ProcessLookupError):
            os.kill(owner, 0)


def test_graphs_exported_side_by_side_are_the_same(
    small_artifacts: Path, small_checkpoint: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    done = Export(small_checkpoint, tmp_path, ["fp32"], workers=2).run(said.append)
    assert {decision.reasons for decision in done} == {("not exported yet",)}
    theirs, ours = folders.load(small_artifacts), folders.load(tmp_path)
    assert {e.stage for e in ours.graphs} == {e.stage for e in theirs.graphs}
    for entry in ours.graphs:
        entry.verified(tmp_path)
        other = theirs.graph("fp32", entry.stage)
        assert (entry.graph, entry.data) == (other.graph, other.data)
    assert any(text.count("exporting") == 2 for text in said), "two at a time"
    assert any("(1 of 3, about" in text for text in said)
    assert Export(small_checkpoint, tmp_path, ["fp32"], workers=2).run(silent) == [
        Decision(decision.what, ()) for decision in done
    ]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling(kind: type[LDLMError]) -> None:
    error = kind("a problem", stage="denoiser", tensor="x_t", expected=1, got=2, remedy="none")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.problem, again.details) == (str(error), error.problem, error.details)


def test_limits_of_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2's files and version 1's; the tightest level decides, and "max" is no limit."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr(memory, "_cgroups", lambda _: [inner, inner.parent])
    whole = memory.available_bytes()
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("50\n")
    assert memory.available_bytes() > whole / 2
    (inner.parent / "memory.limit_in_bytes").write_text("1000\n")
    (inner.parent / "memory.usage_in_bytes").write_text("600\n")
    (inner.parent / "memory.stat").write_text("cache 9\ntotal_inactive_file 100\n")
    assert memory.available_bytes() == 500
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert memory.cores() == 8
    (inner / "cpu.max").write_text("max 100000\n")
    assert memory.cores() == 8
    (inner.parent / "cpu.cfs_quota_us").write_text("350000\n")
    (inner.parent / "cpu.cfs_period_us").write_text("100000\n")
    assert memory.cores() == 3
    (inner / "cpu.max").write_text("50000 100000\n")
    assert memory.cores() == 1
