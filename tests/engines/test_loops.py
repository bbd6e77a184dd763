"""Every way through the steps gives the text of the plain one."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from engines import OrtStage
from engines.artifacts import folder as folders
from engines.runtime.load import load_stages
from engines.runtime.ort_loop import OrtLoop
from engines.runtime.step_tables import parts
from export.stages import TABLE_STEPS
from ldlm.errors import ConfigError, StageInputError
from ldlm.noise import NoiseStream
from ldlm.sampler import SampleRequest, Stages, plain_loop, sample
from ldlm.schedule import TangentSchedule
from ldlm.solvers import SOLVERS, StepTable, step_table


def request(**fields: object) -> SampleRequest:
    return SampleRequest(d_model=128, **{"length": 16, "samples": 2, "batch_size": 2, **fields})


def both(folder: Path) -> tuple[Stages, Stages]:
    manifest = folders.load(folder)
    return load_stages(folder, manifest), load_stages(folder, manifest, plain=True)


def table_of(solver: str, steps: int) -> StepTable:
    schedule = TangentSchedule()
    return step_table(solver, schedule, schedule.grid(steps))


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_same_tokens_as_the_plain_loop_for_1024_steps(
    small_artifacts: Path, solver: str
) -> None:
    loop, plain = both(small_artifacts)
    asked = request(solver=solver, steps=1024)
    tokens = sample(loop, asked)
    assert np.array_equal(tokens, sample(plain, asked))
    assert len(np.unique(tokens)) > 4


@pytest.mark.parametrize("steps", [1, TABLE_STEPS - 1, TABLE_STEPS, TABLE_STEPS + 1, 150])
def test_latents_over_several_tables(small_artifacts: Path, steps: int) -> None:
    loop, plain = both(small_artifacts)
    table = table_of("ddim", steps)
    found, expected = (
        run(table)(NoiseStream(3, range(2), (9, 128)), lambda: None)
        for run in (loop.loop, plain_loop(plain))
    )
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_a_grid_of_ones_own(small_artifacts: Path) -> None:
    loop, plain = both(small_artifacts)
    asked = request(solver="ddpm", grid=(1.0, 0.97, 0.6, 0.31, 0.3, 0.0))
    assert np.array_equal(sample(loop, asked), sample(plain, asked))


def test_a_batch_changes_no_text(small_artifacts: Path) -> None:
    """Batches of another size, and a last one that is smaller, share the tables of one run."""
    loop, _ = both(small_artifacts)
    one, three = (
        sample(loop, request(samples=7, batch_size=size, steps=70, solver="ddpm"))
        for size in (1, 3)
    )
    assert np.array_equal(one, three)


def test_progress_is_told_after_every_step(small_artifacts: Path) -> None:
    loop, _ = both(small_artifacts)
    seen: list[tuple[int, int]] = []
    asked = request(samples=3, batch_size=2, steps=25)
    sample(loop, asked, lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, 50) for n in range(50)]


def opened(folder: Path, name: str) -> OrtStage:
    return OrtStage.from_artifacts(folder, folders.load(folder), name, "fp32")


def test_the_loops_state_is_its_own(small_artifacts: Path) -> None:
    """A second batch must not change what the first has returned."""
    run = OrtLoop(
        opened(small_artifacts, "conditioning"), opened(small_artifacts, "denoiser_step")
    )(table_of("ddim", 3))
    first = run(NoiseStream(0, range(1), (5, 128)), lambda: None)
    kept = first.copy()
    run(NoiseStream(1, range(1), (5, 128)), lambda: None)
    assert np.array_equal(first, kept)


@pytest.mark.parametrize("fault", ["another row", "a stale estimate", "no noise"])
def test_a_fault_in_the_loop_is_noticed(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What these tests would see if the loop forgot something."""
    from engines.runtime import ort_loop

    loop, plain = both(small_artifacts)
    if fault == "another row":
        numbers = itertools.count()
        first = ort_loop.Buffers.call

        def call(self: ort_loop.Buffers) -> None:
            if next(numbers) == 3:
                self._state["step"][self._turn].update_inplace(np.zeros(1, np.int64))
            first(self)

        monkeypatch.setattr(ort_loop.Buffers, "call", call)
    elif fault == "a stale estimate":
        made = ort_loop.Buffers._bound

        def bound(self: ort_loop.Buffers, source: int):  # type: ignore[no-untyped-def]
            binding = made(self, source)
            binding.bind_ortvalue_input("x0_prev", self._inputs["noise"])
            return binding

        monkeypatch.setattr(ort_loop.Buffers, "_bound", bound)
    else:
        monkeypatch.setattr(ort_loop.Buffers, "draw", lambda *_: None)
    asked = request(solver="ddpm", steps=30)
    assert not np.array_equal(sample(loop, asked), sample(plain, asked))


def test_a_length_that_the_graph_does_not_take(small_artifacts: Path) -> None:
    loop, _ = both(small_artifacts)
    with pytest.raises(StageInputError, match="length"):
        sample(loop, request(length=129, steps=30))


def test_other_runtimes_have_one_loop(small_artifacts: Path) -> None:
    with pytest.raises(ConfigError, match="plain is for"):
        load_stages(small_artifacts, folders.load(small_artifacts), runtime="evaluator", plain=True)


def test_parts_cover_all_steps_once() -> None:
    table = table_of("ddpm", 130)
    found = parts(table)
    assert [part.steps for part in found] == [64, 64, 2]
    assert np.array_equal(np.concatenate([p.t[: p.steps] for p in found]), table.t)
    rows = np.concatenate([p.coefficients[: p.steps] for p in found])
    assert np.array_equal(rows, np.stack((table.A, table.B, table.C), axis=1))
    assert [found[2].draws(row) for row in (0, 1)] == [True, False]  # the last step adds none
