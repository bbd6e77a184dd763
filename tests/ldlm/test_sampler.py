"""The sampler and its noise, on stages that can be followed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ldlm.errors import SamplerError
from ldlm.noise import NoiseStream
from ldlm.sampler import SampleRequest, Stages, sample
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

D, T = 4, 3


def toy(x_t, t, x0_prev):  # type: ignore[no-untyped-def]
    return x_t * 0.5 + x0_prev * 0.25 + t[:, None, None] * 0.125


def ids_of(h):  # type: ignore[no-untyped-def]
    return np.asarray((np.asarray(h).sum(-1) * 1000).round(), np.int64)


STAGES = Stages(toy, lambda z: z, ids_of)


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
        request = SampleRequest(d_model=D, length=T, steps=24, solver=solver, seed=5)
        assert np.array_equal(sample(STAGES, request), ids_of(x))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_text_does_not_depend_on_its_batch(batch_size: int) -> None:
    request = SampleRequest(d_model=D, length=T, samples=5, steps=20, batch_size=5)
    split = SampleRequest(d_model=D, length=T, samples=5, steps=20, batch_size=batch_size)
    assert np.array_equal(sample(STAGES, request), sample(STAGES, split))
    assert len(np.unique(sample(STAGES, request), axis=0)) == 5


def test_any_array_type() -> None:
    """The same bits from torch tensors as from NumPy arrays."""
    stages = Stages(toy, lambda z: z, ids_of, to_array=torch.from_numpy)
    request = SampleRequest(d_model=D, length=T, samples=2, steps=30, batch_size=2)
    assert np.array_equal(sample(stages, request), sample(STAGES, request))


def test_progress_counts_every_call() -> None:
    seen: list[tuple[int, int]] = []
    request = SampleRequest(d_model=D, length=T, samples=3, steps=20, batch_size=2)
    sample(STAGES, request, lambda done, total: seen.append((done, total)))
    assert seen == [(i, 40) for i in range(1, 41)]


def test_own_grid_counts_its_own_steps() -> None:
    calls = []

    def counting(x_t, t, x0_prev):  # type: ignore[no-untyped-def]
        calls.append(float(t[0]))
        return toy(x_t, t, x0_prev)

    request = SampleRequest(d_model=D, length=T, grid=[0.9, 0.4, 0.0], solver="ddim")
    sample(Stages(counting, lambda z: z, ids_of), request)
    assert calls == [pytest.approx(0.9), pytest.approx(0.4)]


@pytest.mark.parametrize("field", ["samples", "length", "batch_size", "d_model"])
def test_unusable_requests(field: str) -> None:
    with pytest.raises(SamplerError, match=field):
        SampleRequest(**{"d_model": D, "length": T, field: 0})


def test_stages_that_are_alone_get_one_sample_at_a_time() -> None:
    seen: list[int] = []

    def counting(x, t, x0_prev):  # type: ignore[no-untyped-def]
        seen.append(len(x))
        return toy(x, t, x0_prev)

    request = SampleRequest(d_model=4, length=3, samples=5, batch_size=3, steps=30)
    apart = sample(Stages(counting, lambda z: z, ids_of, alone=True), request)
    assert set(seen) == {1}
    assert len(seen) == 5 * 30
    assert np.array_equal(apart, sample(STAGES, request))
