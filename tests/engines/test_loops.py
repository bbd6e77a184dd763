"""Every way through the steps gives the text of the plain one."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engines import OrtStage
from engines.artifacts import folder as folders
from engines.runtime import ort_loop
from engines.runtime.load import load_stages
from engines.runtime.ort_loop import OrtLoop
from engines.runtime.step_tables import Tables, tables
from export.stages import TABLE_STEPS
from ldlm.errors import ConfigError, StageInputError
from ldlm.noise import NoiseStream
from ldlm.sampler import Loop, SampleRequest, Stages, sample
from ldlm.schedule import TangentSchedule
from ldlm.solvers import SOLVERS, StepTable, step_table


def request(**fields: object) -> SampleRequest:
    return SampleRequest(**{"length": 16, "samples": 2, "batch_size": 2, **fields})


def both(folder: Path) -> tuple[Stages, Stages]:
    manifest = folders.load(folder)
    return load_stages(folder, manifest), load_stages(folder, manifest, plain=True)


def table_of(solver: str, steps: int) -> StepTable:
    schedule = TangentSchedule()
    return step_table(solver, schedule, schedule.grid(steps))


def latents(loop: Loop, table: StepTable, noise: NoiseStream) -> np.ndarray:
    """The state after the last step."""
    for step in loop(table)(noise):
        z = step.x()
    return z


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
        latents(stages.loop, table, NoiseStream(3, range(2), (9, 128))) for stages in (loop, plain)
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


def test_what_a_step_returned_does_not_change_any_more(small_artifacts: Path) -> None:
    loop = OrtLoop(
        opened(small_artifacts, "conditioning"), opened(small_artifacts, "denoiser_step")
    )
    table = table_of("ddim", 3)
    first = latents(loop, table, NoiseStream(0, range(1), (5, 128)))
    kept = first.copy()
    latents(loop, table, NoiseStream(1, range(1), (5, 128)))
    assert np.array_equal(first, kept)


def test_the_estimates_of_a_loop_are_the_plain_ones(small_artifacts: Path) -> None:
    loop, plain = both(small_artifacts)
    table = table_of("ddpm", 5)
    found, expected = (
        [step.x0_hat() for step in stages.loop(table)(NoiseStream(3, range(2), (9, 128)))]
        for stages in (loop, plain)
    )
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def texts(stages: Stages, seed: int, length: int) -> np.ndarray:
    return sample(
        stages, request(seed=seed, length=length, steps=30, solver="ddpm", samples=3, batch_size=2)
    )


def test_threads_share_stages_and_get_the_texts_that_they_get_alone(small_artifacts: Path) -> None:
    """Four threads, several shapes: nothing of one run is seen by another."""
    stages, _ = both(small_artifacts)
    asked = [(seed, (5, 16, 16, 9)[seed % 4]) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda item: texts(stages, *item), asked))
    for item, ids in zip(asked, found, strict=True):
        assert np.array_equal(ids, texts(stages, *item)), item


def test_runs_that_take_turns_in_one_thread_do_not_mix(small_artifacts: Path) -> None:
    stages, _ = both(small_artifacts)
    table = table_of("ddpm", 20)
    runs = [stages.loop(table)(NoiseStream(seed, range(1), (5, 128))) for seed in (0, 1)]
    for pair in zip(*runs, strict=True):
        last = [step.x() for step in pair]
    for seed, z in enumerate(last):
        alone = latents(stages.loop, table, NoiseStream(seed, range(1), (5, 128)))
        assert np.array_equal(z, alone)


def test_a_cancelled_run_gives_its_buffers_back(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    first = ort_loop.Buffers.__init__

    def init(self: ort_loop.Buffers, *rest: object) -> None:
        made.append(1)
        first(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ort_loop.Buffers, "__init__", init)
    stages, _ = both(small_artifacts)
    table = table_of("ddpm", 20)
    for _ in range(3):
        run = stages.loop(table)(NoiseStream(0, range(1), (5, 128)))
        next(run)
        run.close()
    assert made == [1]
    expected = latents(stages.loop, table, NoiseStream(0, range(1), (5, 128)))
    fresh, _ = both(small_artifacts)
    assert np.array_equal(latents(fresh.loop, table, NoiseStream(0, range(1), (5, 128))), expected)


@pytest.mark.parametrize("fault", ["another row", "a stale estimate", "no noise", "shared buffers"])
def test_a_fault_in_the_loop_is_noticed(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What these tests would see if the loop forgot something."""
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
    elif fault == "no noise":
        monkeypatch.setattr(ort_loop.Buffers, "draw", lambda *_: None)
    else:
        held = ort_loop.Buffers(*_first_of(small_artifacts))
        monkeypatch.setattr(ort_loop, "Buffers", lambda *_: held)
        with pytest.raises(AssertionError):
            test_runs_that_take_turns_in_one_thread_do_not_mix(small_artifacts)
        return
    asked = request(solver="ddpm", steps=30)
    assert not np.array_equal(sample(loop, asked), sample(plain, asked))


def _first_of(folder: Path) -> tuple[OrtStage, tuple[int, int, int], Tables]:
    first, *_ = tables(table_of("ddpm", 20), opened(folder, "conditioning"))
    return opened(folder, "denoiser_step"), (1, 5, 128), first


def test_a_length_that_the_graph_does_not_take(small_artifacts: Path) -> None:
    loop, _ = both(small_artifacts)
    with pytest.raises(StageInputError, match="length"):
        latents(loop.loop, table_of("ddim", 3), NoiseStream(0, range(1), (129, 128)))


def test_other_runtimes_have_one_loop(small_artifacts: Path) -> None:
    with pytest.raises(ConfigError, match="plain is for"):
        load_stages(small_artifacts, folders.load(small_artifacts), runtime="evaluator", plain=True)


def test_tables_cover_all_steps_once() -> None:
    table = table_of("ddpm", 130)
    found = tables(table, lambda t: 2 * t)
    assert [part.steps for part in found] == [64, 64, 2]
    modulations, rows = (
        np.concatenate([part.inputs[name][: part.steps] for part in found])
        for name in ("modulations", "coefficients")
    )
    assert np.array_equal(modulations, 2 * table.t)
    assert np.array_equal(rows, np.stack((table.A, table.B, table.C), axis=1))
    assert [part.inputs["step"].tolist() for part in found] == [[0], [0], [0]]
    assert [found[2].needs_noise(row) for row in (0, 1)] == [True, False]  # the last step adds none
