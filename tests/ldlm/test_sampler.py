"""The sampler and its noise, on stages that can be followed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ldlm.config import PRESETS
from ldlm.errors import SamplerError
from ldlm.noise import NoiseStream
from ldlm.sampler import DenoiserLoop, LoopStep, Run, SampleRequest, Stages, sample
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

D, T = 4, 3
CONFIG = replace(PRESETS["small"], d_model=D, n_heads=2, n_positions=8)


def toy(x_t, t, x0_prev):  # type: ignore[no-untyped-def]
    return x_t * 0.5 + x0_prev * 0.25 + t[:, None, None] * 0.125


def ids_of(h):  # type: ignore[no-untyped-def]
    return np.asarray((np.asarray(h).sum(-1) * 1000).round(), np.int64)


def stages_of(denoiser=toy, to_array=np.asarray, **options):  # type: ignore[no-untyped-def]
    return Stages(CONFIG, DenoiserLoop(denoiser, to_array), lambda z: z, ids_of, **options)


STAGES = stages_of()


def test_noise_is_the_stated_stream() -> None:
    drawn = NoiseStream(7, range(2, 4), (T, D))
    first, second = drawn.draw(), drawn.draw()
    for row, k in enumerate((2, 3)):
        generator = np.random.Generator(np.random.Philox(key=np.array([7, k], np.uint64)))
        assert np.array_equal(first[row], generator.standard_normal((T, D), dtype=np.float32))
        assert np.array_equal(second[row], generator.standard_normal((T, D), dtype=np.float32))


def test_large_seeds_do_not_collide() -> None:
    near = [NoiseStream(2**63 + i, range(1), (T, D)).draw() for i in range(2)]
    assert not np.array_equal(*near)
    for seed in (-1, 2**64):
        with pytest.raises(SamplerError, match="seed"):
            NoiseStream(seed, range(1), (T, D))


def test_the_loop_by_hand() -> None:
    """One sample, three solvers, float32 step by step with the noise of its own stream."""
    schedule = TangentSchedule()
    for solver in ("euler", "ddpm", "ddim"):
        table = step_table(solver, schedule, schedule.grid(24))
        noise = NoiseStream(5, range(1), (T, D))
        x = noise.draw()
        x0 = np.zeros_like(x)
        for i in range(24):
            x0 = toy(x, np.full(1, table.t[i]), x0)
            assert x0.dtype == np.float32
            x = table.A[i] * x + table.B[i] * x0
            if solver != "ddim" and i < 23:
                x = x + table.C[i] * noise.draw()
        request = SampleRequest(length=T, steps=24, solver=solver, seed=5)
        assert np.array_equal(sample(STAGES, request), ids_of(x))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_text_does_not_depend_on_its_batch(batch_size: int) -> None:
    request = SampleRequest(length=T, samples=5, steps=20, batch_size=5)
    split = SampleRequest(length=T, samples=5, steps=20, batch_size=batch_size)
    assert np.array_equal(sample(STAGES, request), sample(STAGES, split))
    assert len(np.unique(sample(STAGES, request), axis=0)) == 5


def test_any_array_type() -> None:
    """The same bits from torch tensors as from NumPy arrays."""
    stages = stages_of(to_array=torch.from_numpy)
    request = SampleRequest(length=T, samples=2, steps=30, batch_size=2)
    assert np.array_equal(sample(stages, request), sample(STAGES, request))


def test_progress_counts_every_call() -> None:
    seen: list[tuple[int, int]] = []
    request = SampleRequest(length=T, samples=3, steps=20, batch_size=2)
    sample(STAGES, request, lambda done, total: seen.append((done, total)))
    assert seen == [(i, 40) for i in range(1, 41)]


def test_own_grid_counts_its_own_steps() -> None:
    calls = []

    def counting(x_t, t, x0_prev):  # type: ignore[no-untyped-def]
        calls.append(float(t[0]))
        return toy(x_t, t, x0_prev)

    request = SampleRequest(length=T, grid=[0.9, 0.4, 0.0], solver="ddim")
    sample(stages_of(counting), request)
    assert calls == [pytest.approx(0.9), pytest.approx(0.4)]


@pytest.mark.parametrize("field", ["samples", "length", "batch_size"])
def test_unusable_requests(field: str) -> None:
    with pytest.raises(SamplerError, match=field):
        SampleRequest(**{"length": T, field: 0})


def test_stages_that_take_one_sample_at_a_time() -> None:
    seen: list[int] = []

    def counting(x, t, x0_prev):  # type: ignore[no-untyped-def]
        seen.append(len(x))
        return toy(x, t, x0_prev)

    request = SampleRequest(length=3, samples=5, batch_size=3, steps=30)
    apart = sample(stages_of(counting, one_at_a_time=True), request)
    assert set(seen) == {1}
    assert len(seen) == 5 * 30
    assert np.array_equal(apart, sample(STAGES, request))


def test_what_a_request_leaves_open_is_the_models() -> None:
    open_ = SampleRequest().of(CONFIG)
    assert (open_.length, open_.steps) == (8, CONFIG.sampler_steps)
    assert open_.solver == "euler"
    assert SampleRequest().of(PRESETS["base"]).length == 64
    grid = SampleRequest(grid=[0.9, 0.1], solver="ddim").of(CONFIG)
    assert (grid.steps, len(grid.table(CONFIG))) == (None, 1)
    with pytest.raises(SamplerError, match="longer than the model has positions"):
        SampleRequest(length=9).of(CONFIG)
    with pytest.raises(SamplerError, match="a grid has its own"):
        SampleRequest(grid=[0.9, 0.1], steps=3)


def test_several_requests_in_one_run_are_each_as_alone() -> None:
    requests = [
        SampleRequest(length=T, samples=3, batch_size=2, steps=20, seed=1),
        SampleRequest(length=5, samples=1, steps=7, solver="ddim", seed=2),
    ]
    run = Run(STAGES, requests)
    seen = [(step.done, step.request) for step in run]
    assert seen == [(n + 1, 0 if n < 40 else 1) for n in range(47)]
    assert run.total == 47
    assert run.seconds > 0
    for ids, request in zip(run.token_ids, requests, strict=True):
        assert np.array_equal(ids, sample(STAGES, request))


class Watched:
    """A loop that knows whether its state was given back."""

    def __init__(self) -> None:
        self.held = 0

    def __call__(self, table):  # type: ignore[no-untyped-def]
        inner = DenoiserLoop(toy)(table)

        def steps(noise):  # type: ignore[no-untyped-def]
            self.held += 1
            try:
                yield from inner(noise)
            finally:
                self.held -= 1

        return steps


@pytest.mark.parametrize("how", ["break", "close", "with", "error"])
def test_leaving_the_loop_gives_back_what_it_holds(how: str) -> None:
    loop = Watched()
    stages = Stages(CONFIG, loop, lambda z: z, ids_of)
    request = SampleRequest(length=T, samples=2, steps=20)
    run = Run(stages, request)
    if how == "break":
        for step in Run(stages, request):
            assert loop.held == 1
            if step.done == 3:
                break
        del step
    elif how == "close":
        next(run)
        run.close()
    elif how == "with":
        with run:
            next(run)
    else:
        next(run)
        with pytest.raises(KeyError), run:
            raise KeyError
    assert loop.held == 0
    assert run.token_ids == []


def test_a_decoder_that_fails_gives_the_state_back() -> None:
    loop = Watched()

    def broken(z):  # type: ignore[no-untyped-def]
        assert loop.held == 1, "the last state is read before it is given back"
        raise KeyError("broken")

    with pytest.raises(KeyError):
        sample(Stages(CONFIG, loop, broken, ids_of), SampleRequest(length=T, steps=20))
    assert loop.held == 0


def test_a_step_shows_the_estimate_and_the_state() -> None:
    request = SampleRequest(length=T, steps=20, solver="ddim")
    table, seen = request.table(CONFIG), []
    for step in Run(STAGES, request):
        assert isinstance(step.loop, LoopStep)
        assert step.loop.seconds >= 0
        seen.append((step.loop.x(), step.loop.x0_hat()))
    for (x, _), (x_next, x0_hat), A, B in zip(
        seen, seen[1:], table.A[1:], table.B[1:], strict=False
    ):
        assert np.array_equal(x_next, A * x + B * x0_hat)
