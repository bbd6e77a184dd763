"""The three solvers, as tables of coefficients. NumPy only.

Each solver's step is affine in the state, the denoiser's estimate and the noise:

    x <- A_i x + B_i x0_hat + C_i eps

with coefficients that depend on the step alone. They are computed in float64 and rounded once to
float32: in float32, tan(pi/2) is -2.3e7. C is 0 at the last step, since nothing should be added
to what is decoded (R).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import SamplerError
from ldlm.schedule import Floats, TangentSchedule

Coefficients = tuple[Floats, Floats, Floats]


@dataclass(frozen=True)
class StepTable:
    """The steps of one sampling run.

    Attributes:
        t: [N] float32, the time at which the denoiser is called.
        A, B, C: [N] float32, the step's coefficients.
    """

    t: NDArray[np.float32]
    A: NDArray[np.float32]
    B: NDArray[np.float32]
    C: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.t)


def euler(schedule: TangentSchedule, t: Floats, s: Floats) -> Coefficients:
    """Reverse SDE, Euler-Maruyama, from t to s = t + dt, dt < 0 (lineage).

    mean = x + (-beta x / 2 - beta score) dt, score = -(x - alpha x0_hat) / sigma^2;
    x <- mean + sqrt(beta) sqrt(-dt) eps.
    """
    dt = s - t
    alpha, sigma, beta = schedule.alpha(t), schedule.sigma(t), schedule.beta(t)
    A = 1.0 + beta * dt * (1.0 / sigma**2 - 0.5)
    if np.any(A[:-1] < 0) or A[-1] < -1:
        # The explicit step overshoots: it turns the sign of x, and at N = 1 multiplies it by -18.
        # Only a last step to t = 0 may: its A is near -1 on the finest of grids.
        raise SamplerError(
            "the euler solver is unstable with steps this large",
            expected="a finer grid (the default one needs 20 steps)",
            got=f"{len(t)} steps, the worst of which multiplies x by {A.min():.2f}",
            remedy="use more steps, or --solver ddim or ddpm",
        )
    return A, -beta * dt * alpha / sigma**2, np.sqrt(beta * -dt)


def ddpm(schedule: TangentSchedule, t: Floats, s: Floats) -> Coefficients:
    """Ancestral sampling: the posterior q(x_s | x_t, x0_hat) (lineage).

    a = alpha(t)^2, b = alpha(s)^2, k = a / b:
    mean = sqrt(b)(1-k)/(1-a) x0_hat + sqrt(k)(1-b)/(1-a) x;  var = (1-b)(1-k)/(1-a).
    """
    a, b = schedule.alpha(t) ** 2, schedule.alpha(s) ** 2
    one_minus_a, one_minus_b = schedule.sigma(t) ** 2, schedule.sigma(s) ** 2
    k = a / b
    return (
        np.sqrt(k) * one_minus_b / one_minus_a,
        np.sqrt(b) * (1 - k) / one_minus_a,
        np.sqrt(one_minus_b * (1 - k) / one_minus_a),
    )


def ddim(schedule: TangentSchedule, t: Floats, s: Floats) -> Coefficients:
    """Deterministic: x <- alpha(s) x0_hat + sigma(s) (x - alpha(t) x0_hat) / sigma(t) (lineage)."""
    ratio = schedule.sigma(s) / schedule.sigma(t)
    return ratio, schedule.alpha(s) - ratio * schedule.alpha(t), np.zeros_like(ratio)


SOLVERS: dict[str, Callable[[TangentSchedule, Floats, Floats], Coefficients]] = {
    "euler": euler,
    "ddpm": ddpm,
    "ddim": ddim,
}


def step_table(solver: str, schedule: TangentSchedule, grid: Floats) -> StepTable:
    """The coefficients of a solver on a decreasing time grid [N + 1].

    Raises:
        SamplerError: no such solver, or the grid is too coarse for it.
    """
    if solver not in SOLVERS:
        raise SamplerError("no such solver", expected=" or ".join(SOLVERS), got=solver)
    A, B, C = SOLVERS[solver](schedule, grid[:-1], grid[1:])
    C = np.append(C[:-1], 0.0)
    return StepTable(*(values.astype(np.float32) for values in (grid[:-1], A, B, C)))
