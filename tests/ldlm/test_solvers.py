"""The solvers' coefficients against the steps written as the sources write them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ldlm.errors import SamplerError
from ldlm.schedule import TangentSchedule, checked_grid
from ldlm.solvers import SOLVERS, step_table

SCHEDULE = TangentSchedule()
GRIDS = {
    "default 32": SCHEDULE.grid(32),
    "default 1024": SCHEDULE.grid(1024),
    "uneven, to 0": checked_grid([1.0, 0.98, 0.97, 0.94, 0.9, 0.87, 0.83, 0.8, 0.74, 0.7, 0.65,
                                  0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
}  # fmt: skip # rows, as a table


def alpha_of(t: float) -> float:
    return 1 / math.sqrt(1 + 9 * math.tan(math.pi * t / 2) ** 2)


def euler_step(x: float, x0: float, eps: float, t: float, s: float) -> float:
    dt, alpha = s - t, alpha_of(t)
    tau = math.tan(math.pi * min(t, 0.95) / 2)
    beta = math.pi * 9 * tau * (1 + tau**2) / (1 + 9 * tau**2)
    score = -(x - alpha * x0) / (1 - alpha**2)
    mean = x + (-beta * x / 2 - beta * score) * dt
    return mean + math.sqrt(beta) * math.sqrt(-dt) * eps


def ddpm_step(x: float, x0: float, eps: float, t: float, s: float) -> float:
    a, b = alpha_of(t) ** 2, alpha_of(s) ** 2
    k = a / b
    mean = math.sqrt(b) * (1 - k) / (1 - a) * x0 + math.sqrt(k) * (1 - b) / (1 - a) * x
    return mean + math.sqrt((1 - b) * (1 - k) / (1 - a)) * eps


def ddim_step(x: float, x0: float, eps: float, t: float, s: float) -> float:
    sigma_t, sigma_s = (math.sqrt(1 - alpha_of(time) ** 2) for time in (t, s))
    return alpha_of(s) * x0 + sigma_s * (x - alpha_of(t) * x0) / sigma_t


STEPS = {"euler": euler_step, "ddpm": ddpm_step, "ddim": ddim_step}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_coefficients_are_the_step(solver: str, grid: np.ndarray) -> None:
    table = step_table(solver, SCHEDULE, grid)
    assert len(table) == len(grid) - 1
    assert all(values.dtype == np.float32 for values in (table.t, table.A, table.B, table.C))
    rng = np.random.default_rng(0)
    for i, (t, s) in enumerate(zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True)):
        x, x0, eps = rng.standard_normal(3)
        last = i == len(table) - 1
        expected = STEPS[solver](x, x0, 0.0 if last else eps, t, s)
        got = float(table.A[i]) * x + float(table.B[i]) * x0 + float(table.C[i]) * eps
        assert got == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert table.C[-1] == 0.0


def test_coefficients_are_rounded_once() -> None:
    """Float64 throughout, then float32: all finite at t = 1, where float32 is not."""
    table = step_table("ddpm", SCHEDULE, SCHEDULE.grid(1024))
    assert np.isfinite([table.A, table.B, table.C]).all()
    assert 0.0 < table.A[0] < 1e-12


@pytest.mark.parametrize("solver", ["ddim", "ddpm"])
def test_a_perfect_denoiser_is_followed(solver: str) -> None:
    """With x0_hat = x0 the mean stays on alpha x0 + (what is left of the noise)."""
    grid = checked_grid([1.0, 0.7, 0.3, 0.0])
    table = step_table(solver, SCHEDULE, grid)
    x0, x = 0.7, -1.3
    for A, B in zip(table.A, table.B, strict=True):
        x = float(A) * x + float(B) * x0
    assert x == pytest.approx(x0, abs=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 19])
def test_euler_refuses_steps_that_are_too_large(steps: int) -> None:
    with pytest.raises(SamplerError, match="unstable"):
        step_table("euler", SCHEDULE, SCHEDULE.grid(steps))
    step_table("ddim", SCHEDULE, SCHEDULE.grid(steps))


def test_euler_takes_a_grid_that_ends_at_0() -> None:
    table = step_table("euler", SCHEDULE, np.append(SCHEDULE.grid(64), 0.0))
    assert -1 <= table.A[-1] < 0 < table.A[:-1].min()


def test_euler_takes_20_steps_and_says_how_bad_1_is() -> None:
    step_table("euler", SCHEDULE, SCHEDULE.grid(20))
    with pytest.raises(SamplerError, match=r"multiplies x by -18\."):
        step_table("euler", SCHEDULE, SCHEDULE.grid(1))


def test_unknown_solver() -> None:
    with pytest.raises(SamplerError, match="euler or ddpm or ddim"):
        step_table("heun", SCHEDULE, SCHEDULE.grid(20))
