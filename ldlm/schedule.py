"""The tangent noise schedule and its time grid. NumPy only, computed in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ldlm.errors import SamplerError

Floats = NDArray[np.float64]

BETA_T_MAX = 0.95  # beta has a pole at t = 1 (lineage: clipped for beta only)


@dataclass(frozen=True)
class TangentSchedule:
    """x_t = alpha(t) x_0 + sigma(t) eps, alpha^2 + sigma^2 = 1, t from 1 (noise) to 0 (data).

    alpha(t) = 1 / sqrt(1 + d^2 tan^2(pi t / 2)) with d = 3 (paper); the rest is lineage.

    Attributes:
        d: the schedule's tangent factor.
        t_min: the last time of the default grid.
    """

    d: float = 3.0
    t_min: float = 0.05

    def alpha(self, t: ArrayLike) -> Floats:
        """The data's share at times t in [0, 1]; float64, the shape of t."""
        return np.asarray(1.0 / np.hypot(1.0, self._slope(t)))

    def sigma(self, t: ArrayLike) -> Floats:
        """The noise's share, sqrt(1 - alpha^2), without its cancellation near t = 0."""
        slope = self._slope(t)
        return np.asarray(slope / np.hypot(1.0, slope))

    def beta(self, t: ArrayLike) -> Floats:
        """pi d^2 tau (1 + tau^2) / (1 + d^2 tau^2), tau = tan(pi t / 2), t clipped to 0.95."""
        tau = np.tan(np.pi * np.minimum(np.asarray(t, np.float64), BETA_T_MAX) / 2)
        d2 = self.d**2
        return np.asarray(np.pi * d2 * tau * (1 + tau**2) / (1 + d2 * tau**2))

    def grid(self, steps: int) -> Floats:
        """`steps + 1` equally spaced times from 1 down to t_min.

        Raises:
            SamplerError: fewer than one step.
        """
        if steps < 1:
            raise SamplerError("a sampler needs steps", expected="at least 1", got=steps)
        return np.linspace(1.0, self.t_min, steps + 1)

    def _slope(self, t: ArrayLike) -> Floats:
        return np.asarray(self.d * np.tan(np.pi * np.asarray(t, np.float64) / 2))


def checked_grid(grid: Sequence[float] | Floats) -> Floats:
    """A user's time grid as float64, if it is one: decreasing, sources in (0, 1], end >= 0.

    Raises:
        SamplerError: it is not.
    """
    times = np.asarray(grid, np.float64)
    good = (
        times.ndim == 1
        and times.size >= 2
        and bool(np.all(np.isfinite(times)))
        and bool(np.all(np.diff(times) < 0))
        and times[0] <= 1.0
        and times[-1] >= 0.0
    )
    if not good:
        raise SamplerError(
            "the time grid cannot be sampled on",
            expected="at least two strictly decreasing times in (0, 1]; only the last may be 0",
            got=np.array2string(times, threshold=6),
        )
    return times
