"""Inputs of the proof: what the stages see when text is generated."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.stages import MAX_BATCH, TABLE_STEPS, StageSpec
from ldlm.config import LDLMConfig
from ldlm.noise import NoiseStream
from ldlm.schedule import TangentSchedule

Array = NDArray[Any]


def clamped(case: tuple[int, int], config: LDLMConfig, largest: int = MAX_BATCH) -> tuple[int, int]:
    """A case (batch, length) that the model has positions for.

    Where the length is cut, the batch grows up to `largest`, so that the case has as many positions
    as before: on trained weights 1 % of them hold a quarter of the squared error, and the ratio
    of two errors over 68 positions scatters by 13 %.
    """
    batch, length = case[0], min(case[1], config.n_positions)
    return max(batch, min(batch * case[1] // length, largest)), length


def stage_inputs(
    spec: StageSpec, config: LDLMConfig, batch: int, length: int, seed: int = 0
) -> tuple[Array, ...]:
    """Inputs of one stage, a stream of their own per sample.

    The denoiser gets noisy latents on the schedule, at times spread over it; the decoders get
    standard normals, the scale of latents and of hidden states after a norm; the loop's graphs
    get a table's times, and vectors of the scale of modulations.
    """
    noise = NoiseStream(seed, range(batch), (length, config.d_model))
    clean = noise.draw()
    schedule = TangentSchedule(config.tangent_d, config.t_min)
    if spec.name == "conditioning":
        return (schedule.grid(TABLE_STEPS)[:-1].astype(np.float32),)
    if spec.name == "denoiser_step":
        table = np.random.default_rng(seed)
        rows = (TABLE_STEPS, config.modulation_rows, config.d_model)
        modulations = 0.5 * table.standard_normal(rows, np.float32)
        coefficients = table.standard_normal((TABLE_STEPS, 3), np.float32)
        return clean, noise.draw(), np.array([5]), modulations, coefficients, noise.draw()
    if spec.name != "denoiser":
        return (clean,)
    t = np.linspace(1.0, config.t_min, batch + 2)[1:-1].astype(np.float32)
    alpha, sigma = (
        f(t).astype(np.float32)[:, None, None] for f in (schedule.alpha, schedule.sigma)
    )
    x_t = alpha * clean + sigma * noise.draw()
    x0_prev = clean + np.float32(0.3) * noise.draw()
    return x_t, t, x0_prev
