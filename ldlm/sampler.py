"""The sampler: noise to tokens, whichever runtime is behind the three stages. NumPy only.

A sampler is a generator of steps: `Run` goes through all batches of all requests, and stops
between two steps whenever its caller does. Progress, drift, benchmarks and deadlines look at the
same steps.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ldlm.config import LDLMConfig
from ldlm.errors import SamplerError
from ldlm.noise import Float32s, NoiseStream
from ldlm.schedule import TangentSchedule, checked_grid
from ldlm.solvers import StepTable, step_table

Ids = NDArray[np.int64]
Stage = Callable[..., Any]


@dataclass(frozen=True)
class LoopStep:
    """One step of a batch, done.

    Attributes:
        seconds: spent inside the runtime's graph.
        x: the state after it [B, T, d], in the runtime's own array type; the last one is z. It
            is to be read before the generator goes on, also at the last step. On a device only
            the last one can be read; the others raise SamplerError.
        x0_hat: the denoiser's estimate [B, T, d] on the host, likewise.
    """

    seconds: float
    x: Callable[[], Any]
    x0_hat: Callable[[], Float32s]


# All steps of a batch, as many as its table has, from its noise. What they hold goes back when the
# generator is closed or asked for more.
Steps = Callable[[NoiseStream], Generator[LoopStep, None, None]]
# What a runtime prepares for a table of steps, once for all batches.
Loop = Callable[[StepTable], Steps]


@dataclass(frozen=True)
class Stages:
    """What a runtime samples with. May be shared by threads: every run has a state of its own.

    Attributes:
        config: of the model.
        loop: all steps of a batch.
        latent_decoder: z [B, T, d] -> h_hat [B, T, d].
        token_decoder: h_hat [B, T, d] -> token ids [B, T].
        one_at_a_time: whether every sample goes through by itself, because a batch would change it.
    """

    config: LDLMConfig
    loop: Loop
    latent_decoder: Stage
    token_decoder: Stage
    one_at_a_time: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """What to sample; None is the model's own.

    Attributes:
        samples: number of texts.
        length: positions per text, T; by default 64, or the model's most.
        batch_size: texts that go through the stages together; changes no text. Stages that take
            samples one at a time do so.
        steps: denoiser calls, on the schedule's own grid.
        grid: a decreasing time grid of one's own, in place of `steps`.
        solver: a name in `ldlm.solvers.SOLVERS`.
        seed: see `ldlm.noise`.
    """

    samples: int = 1
    length: int | None = None
    batch_size: int = 1
    steps: int | None = None
    grid: Sequence[float] | None = None
    solver: str = "euler"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SamplerError(f"{name} is not usable", expected="at least 1", got=value)
        if self.grid is not None and self.steps is not None:
            raise SamplerError("a grid has its own number of steps", got="a grid and steps")

    def of(self, config: LDLMConfig) -> SampleRequest:
        """The request with the model's own values in place of None.

        Raises:
            SamplerError: the text is longer than the model has positions.
        """
        length = min(64, config.n_positions) if self.length is None else self.length
        if length > config.n_positions:
            raise SamplerError(
                "the text is longer than the model has positions",
                expected=f"at most {config.n_positions}",
                got=length,
            )
        steps = self.steps
        if steps is None and self.grid is None:
            steps = config.sampler_steps
        return replace(self, length=length, steps=steps)

    def table(self, config: LDLMConfig) -> StepTable:
        """Its steps, on the model's schedule.

        Raises:
            SamplerError: a grid or a solver that cannot be used.
        """
        schedule = TangentSchedule(config.tangent_d, config.t_min)
        steps = self.of(config).steps
        grid = checked_grid(self.grid or ()) if steps is None else schedule.grid(steps)
        return step_table(self.solver, schedule, grid)


@dataclass(frozen=True)
class Step:
    """Progress of a run.

    Attributes:
        done, total: steps of all batches of all requests.
        request: the number of the request that is being sampled.
        loop: the step itself.
    """

    done: int
    total: int
    request: int
    loop: LoopStep


class Run:
    """Requests on their way: an iterator of steps, and then their tokens.

    Leaving the loop, `close` or the end of a `with` cancels it and gives back what it holds.

    Args:
        stages: of any runtime.
        requests: one, or several that are sampled one after the other.

    Attributes:
        token_ids: of every request that is done, [samples, T].
        seconds: from the first step until the run was last looked at for another.

    Raises:
        SamplerError: an unusable request; before the first step.
    """

    def __init__(self, stages: Stages, requests: SampleRequest | Sequence[SampleRequest]) -> None:
        asked = [requests] if isinstance(requests, SampleRequest) else requests
        self._requests = [request.of(stages.config) for request in asked]
        self._tables = [request.table(stages.config) for request in self._requests]
        self.total = sum(
            len(table) * len(_batches(stages, request))
            for request, table in zip(self._requests, self._tables, strict=True)
        )
        for request in self._requests:  # a seed that cannot be used
            NoiseStream(request.seed, range(0), (1, 1))
        self.token_ids: list[Ids] = []
        self.seconds = 0.0
        self._started: float | None = None
        # It knows nothing of this object: who drops the run cancels it at once.
        self._steps = _steps(stages, self._requests, self._tables, self.total, self.token_ids)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self._started = self._started or time.perf_counter()
        try:
            return next(self._steps)
        finally:
            self.seconds = time.perf_counter() - self._started

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop between two steps."""
        self._steps.close()


def _steps(
    stages: Stages,
    requests: Sequence[SampleRequest],
    tables: Sequence[StepTable],
    total: int,
    token_ids: list[Ids],
) -> Generator[Step, None, None]:
    """All steps; the tokens of each request join `token_ids` when it is done."""
    done = 0
    for number, (request, table) in enumerate(zip(requests, tables, strict=True)):
        steps = stages.loop(table)
        shape = (request.length or 0, stages.config.d_model)
        ids = []
        for indices in _batches(stages, request):
            with closing(steps(NoiseStream(request.seed, indices, shape))) as loop:
                # Asked for one more, the loop would give back the state that is still to be read.
                for step in itertools.islice(loop, len(table)):
                    done += 1
                    yield Step(done, total, number, step)
                h_hat = stages.latent_decoder(step.x())
                ids.append(np.asarray(stages.token_decoder(h_hat), np.int64))
        token_ids.append(np.concatenate(ids))


def _batches(stages: Stages, request: SampleRequest) -> list[range]:
    size = 1 if stages.one_at_a_time else request.batch_size
    return [
        range(first, min(first + size, request.samples))
        for first in range(0, request.samples, size)
    ]


def sample(
    stages: Stages,
    request: SampleRequest,
    progress: Callable[[int, int], None] | None = None,
) -> Ids:
    """Sample token ids [samples, T].

    Args:
        stages: of any runtime.
        request: what to sample.
        progress: called with (steps done, steps in all) after every step.

    Raises:
        SamplerError: an unusable request.
    """
    run = Run(stages, request)
    for step in run:
        if progress is not None:
            progress(step.done, step.total)
    (ids,) = run.token_ids
    return ids


class DenoiserLoop:
    """`Loop` as it is written down: one denoiser call and one update per step.

    Every step evaluates A x + B x0_hat + C eps in this order in float32, so that all runtimes and
    loops round alike; only a GPU may contract a product and a sum.

    Args:
        denoiser: (x_t [B,T,d], t [B], x0_prev [B,T,d]) -> x0_hat [B,T,d], on arrays of any type
            with + and *.
        to_array: turns a NumPy array into that type.
    """

    def __init__(
        self, denoiser: Stage, to_array: Callable[[Float32s], Any] = lambda array: array
    ) -> None:
        self._denoiser, self._to_array = denoiser, to_array

    def __call__(self, table: StepTable) -> Steps:
        """Nothing needs to be prepared; see `Loop`."""
        return lambda noise: self._steps(table, noise)

    def _steps(self, table: StepTable, noise: NoiseStream) -> Generator[LoopStep, None, None]:
        x = self._to_array(noise.draw())
        x0_hat = self._to_array(np.zeros(noise.shape, np.float32))
        for t, A, B, C in zip(table.t, table.A, table.B, table.C, strict=True):
            times = self._to_array(np.full(len(x), t))
            started = time.perf_counter()
            x0_hat = self._denoiser(x, times, x0_hat)
            seconds = time.perf_counter() - started
            # Python floats: they hold the float32 values exactly and promote no array type.
            mean = float(A) * x + float(B) * x0_hat
            x = mean + float(C) * self._to_array(noise.draw()) if C else mean
            yield LoopStep(seconds, lambda x=x: x, lambda e=x0_hat: np.asarray(e))  # type: ignore[misc]
