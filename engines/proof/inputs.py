"""Inputs of the proof: what the stages see when text is generated."""

from collections.abc import Callable

import numpy as np

from engines.runtime.stage import Array
from export.stages import BATCH, LENGTH, MAX_BATCH, StageSpec, TensorSpec
from ldlm.config import LDLMConfig
from ldlm.noise import NoiseStream
from ldlm.schedule import TangentSchedule


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
    """Inputs of one stage, a stream of their own per sample; see `LIKE`."""
    source = Source(config, batch, length, seed)
    return tuple(LIKE[tensor.like](source, tensor) for tensor in spec.inputs)


class Source:
    """Random numbers for the inputs of one call, all drawn from one seed.

    Attributes:
        noise: gives fresh standard normals [B, T, d].
        times: [B], spread over the schedule.
    """

    def __init__(self, config: LDLMConfig, batch: int, length: int, seed: int) -> None:
        self.config = config
        self.sizes = {BATCH: batch, LENGTH: length}
        self.schedule = TangentSchedule(config.tangent_d, config.t_min)
        self.noise = NoiseStream(seed, range(batch), (length, config.d_model)).draw
        self.latents = self.noise()
        self.table = np.random.default_rng(seed)
        self.times = np.linspace(1.0, config.t_min, batch + 2)[1:-1].astype(np.float32)


def _noisy(source: Source, tensor: TensorSpec) -> Array:
    """x_t = alpha(t) x_0 + sigma(t) eps."""
    schedule, times = source.schedule, source.times
    alpha, sigma = (
        f(times).astype(np.float32)[:, None, None] for f in (schedule.alpha, schedule.sigma)
    )
    noisy: Array = alpha * source.latents + sigma * source.noise()
    return noisy


def _of_table(scale: float) -> Callable[[Source, TensorSpec], Array]:
    return lambda source, tensor: (
        np.float32(scale)
        * source.table.standard_normal(tensor.shape(source.config, source.sizes), np.float32)
    )


# How an input is drawn, by what it is in generation (`TensorSpec.like`). Latents, and hidden states
# after a norm, are of the scale of standard normals; modulations are smaller.
LIKE: dict[str, Callable[[Source, TensorSpec], Array]] = {
    "latents": lambda source, _: source.latents,
    "noise": lambda source, _: source.noise(),
    "noisy latents": _noisy,
    "estimate": lambda source, _: source.latents + np.float32(0.3) * source.noise(),
    "times": lambda source, _: source.times,
    "times of a table": lambda source, tensor: source.schedule.grid(
        *(int(axis) for axis in tensor.axes)
    )[:-1].astype(np.float32),
    "number of a step": lambda *_: np.array([5]),
    "modulations": _of_table(0.5),
    "coefficients": _of_table(1.0),
}
