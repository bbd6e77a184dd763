"""The tangent schedule against its formulas, and the grids it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ldlm.errors import SamplerError
from ldlm.schedule import TangentSchedule, checked_grid

SCHEDULE = TangentSchedule()


@given(st.floats(0.001, 0.999))
def test_alpha_sigma_beta(t: float) -> None:
    tau = math.tan(math.pi * t / 2)
    alpha = 1 / math.sqrt(1 + 9 * tau**2)
    assert float(SCHEDULE.alpha(t)) == pytest.approx(alpha, rel=1e-12)
    assert float(SCHEDULE.sigma(t)) == pytest.approx(math.sqrt(1 - alpha**2), rel=1e-8)
    clipped = math.tan(math.pi * min(t, 0.95) / 2)
    beta = math.pi * 9 * clipped * (1 + clipped**2) / (1 + 9 * clipped**2)
    assert float(SCHEDULE.beta(t)) == pytest.approx(beta, rel=1e-12)


@given(st.floats(0.01, 0.94))
def test_beta_is_the_rate_of_alpha(t: float) -> None:
    """d log alpha / dt = -beta / 2: the three functions belong to one process."""
    h = 1e-6
    slope = (np.log(SCHEDULE.alpha(t + h)) - np.log(SCHEDULE.alpha(t - h))) / (2 * h)
    assert float(slope) == pytest.approx(-float(SCHEDULE.beta(t)) / 2, rel=1e-5)


def test_ends() -> None:
    assert float(SCHEDULE.alpha(0.0)) == 1.0
    assert float(SCHEDULE.sigma(0.0)) == 0.0
    assert 0 < float(SCHEDULE.alpha(1.0)) < 1e-15  # finite in float64, where float32 is -2.3e7
    assert float(SCHEDULE.sigma(1.0)) == 1.0
    assert float(SCHEDULE.beta(0.97)) == float(SCHEDULE.beta(0.95))  # clipped
    # 1 - alpha^2 would be 0 here
    assert float(SCHEDULE.sigma(1e-9)) == pytest.approx(1.5e-9 * math.pi, rel=1e-9)
    assert float(SCHEDULE.sigma(0.05)) == pytest.approx(0.23, abs=0.005)


def test_grid() -> None:
    grid = SCHEDULE.grid(1024)
    assert grid.shape == (1025,)
    assert (grid[0], grid[-1]) == (1.0, 0.05)
    assert np.allclose(np.diff(grid), -0.95 / 1024)
    with pytest.raises(SamplerError):
        SCHEDULE.grid(0)


@pytest.mark.parametrize(
    "grid",
    [
        [1.0],
        [0.5, 0.5],
        [0.2, 0.5],
        [1.1, 0.5],
        [0.5, -0.1],
        [0.5, 0.0, -0.1],
        [float("nan"), 0.1],
        [[1.0, 0.5]],
        [],
    ],
)
def test_unusable_grids_are_refused(grid: list[float]) -> None:
    with pytest.raises(SamplerError, match="time grid"):
        checked_grid(grid)


def test_a_grid_may_end_at_0() -> None:
    assert checked_grid([1.0, 0.5, 0.0]).tolist() == [1.0, 0.5, 0.0]
