"""The sampler: noise to tokens, whichever runtime is behind the three stages. NumPy only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import SamplerError
from ldlm.noise import Float32s, NoiseStream
from ldlm.schedule import TangentSchedule, checked_grid
from ldlm.solvers import StepTable, step_table

Stage = Callable[..., Any]
Tick = Callable[[], None]
# All steps of a batch: its noise in, latents z [B, T, d] out. `Tick` is called after every step.
Run = Callable[[NoiseStream, Tick], Any]
# What a runtime prepares for a table of steps, once for all batches.
Loop = Callable[[StepTable], Run]


@dataclass(frozen=True)
class Stages:
    """The three stages as plain callables; arrays in, array out.

    Where the denoiser is called step by step, arrays are of one type with + and *.

    Attributes:
        denoiser: (x_t [B,T,d], t [B], x0_prev [B,T,d]) -> x0_hat [B,T,d]. None where the runtime
            has nothing but a loop of its own.
        latent_decoder: z [B,T,d] -> h_hat [B,T,d].
        token_decoder: h_hat [B,T,d] -> token ids [B,T].
        to_array: turns a NumPy array into the stages' array type.
        loop: a runtime's own way through the steps; None calls the denoiser step by step.
        alone: whether every sample goes through by itself, because a batch would change it.
    """

    denoiser: Stage | None
    latent_decoder: Stage
    token_decoder: Stage
    to_array: Callable[[Float32s], Any] = lambda array: array
    loop: Loop | None = field(default=None, kw_only=True)
    alone: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """What to sample.

    Attributes:
        d_model: width of the latents.
        length: positions per text, T.
        samples: number of texts.
        batch_size: texts that go through the stages together; changes no text. Stages that are
            `alone` take each by itself.
        steps: denoiser calls, on the schedule's own grid.
        grid: a decreasing time grid of one's own, in place of `steps`.
        solver: a name in `ldlm.solvers.SOLVERS`.
        seed: see `ldlm.noise`.
        schedule: the noise schedule.
    """

    d_model: int
    length: int
    samples: int = 1
    batch_size: int = 1
    steps: int = 1024
    grid: Sequence[float] | None = None
    solver: str = "euler"
    seed: int = 0
    schedule: TangentSchedule = field(default_factory=TangentSchedule)

    def __post_init__(self) -> None:
        for name in ("d_model", "length", "samples", "batch_size"):
            if getattr(self, name) < 1:
                raise SamplerError(
                    f"{name} is not usable", expected="at least 1", got=getattr(self, name)
                )


def sample(
    stages: Stages,
    request: SampleRequest,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Sample token ids [samples, T].

    Every step evaluates A x + B x0_hat + C eps in this order in float32, so that all runtimes
    and loops round alike; only a GPU may contract a product and a sum.

    Args:
        stages: the three stages.
        request: what to sample.
        progress: called with (steps done, steps in all) after every denoiser call.

    Raises:
        SamplerError: an unusable request.
    """
    schedule = request.schedule
    grid = schedule.grid(request.steps) if request.grid is None else checked_grid(request.grid)
    table = step_table(request.solver, schedule, grid)
    size = 1 if stages.alone else request.batch_size
    batches = [
        range(first, min(first + size, request.samples))
        for first in range(0, request.samples, size)
    ]
    done, total = itertools.count(1), len(table) * len(batches)

    def tick() -> None:
        if progress is not None:
            progress(next(done), total)

    run = (stages.loop or plain_loop(stages))(table)
    tokens = []
    for indices in batches:
        noise = NoiseStream(request.seed, indices, (request.length, request.d_model))
        ids = stages.token_decoder(stages.latent_decoder(run(noise, tick)))
        tokens.append(np.asarray(ids, np.int64))
    return np.concatenate(tokens)


def plain_loop(stages: Stages) -> Loop:
    """The loop as it is written down: one denoiser call and one update per step."""
    return lambda table: functools.partial(_steps, stages, table)


def _steps(stages: Stages, table: StepTable, noise: NoiseStream, tick: Tick) -> Any:
    if stages.denoiser is None:
        raise SamplerError("these stages have neither a denoiser nor a loop")
    x = stages.to_array(noise.draw())
    x0_hat = stages.to_array(np.zeros(noise.shape, np.float32))
    for t, A, B, C in zip(table.t, table.A, table.B, table.C, strict=True):
        times = stages.to_array(np.full(len(x), t))
        x0_hat = stages.denoiser(x, times, x0_hat)
        # Python floats: they hold the float32 values exactly and promote no array type.
        mean = float(A) * x + float(B) * x0_hat
        x = mean + float(C) * stages.to_array(noise.draw()) if C else mean
        tick()
    return x
