"""The graphs that passes make of the plain ones, held to the same reference and limits."""

from collections.abc import Iterator

import numpy as np

from engines.proof.gates import precision_limit
from engines.proof.questions import Question
from engines.proof.records import Measurement
from engines.proof.subject import ALL, Subject, pooled_distance
from engines.runtime.stage import Array, RuntimeStage, named
from export.stages import LOOP, TABLE_STEPS
from ldlm.noise import NoiseStream


class LoopDenoiser:
    """The two graphs of the loop as a denoiser; every sample in a call of its own, at its time.

    Args:
        conditioning, step: the graphs, on any runtime.
        whole: let a call take the whole batch, of which one sample is kept, as a test of sizes
            above 1 demands; otherwise it takes that sample alone.

    Attributes:
        inexact: elements of x_next and next_step, so far, that are not the update of the graph's
            own x0_hat and step + 1.
        elements: elements in all.
    """

    def __init__(
        self, conditioning: RuntimeStage, step: RuntimeStage, *, whole: bool = False
    ) -> None:
        self._conditioning, self._step, self._whole = conditioning, step, whole
        self.inexact = self.elements = 0
        self._squares = np.zeros(2)  # of what is wrong in x_next, and of x_next

    def __call__(self, x_t: Array, t: Array, x0_prev: Array) -> Array:
        """x_t [B, T, d], t [B], x0_prev [B, T, d] -> x0_hat [B, T, d]."""
        times = np.ones(TABLE_STEPS, np.float32)
        times[: len(t)] = t
        modulations = self._conditioning(times)
        coefficients = np.random.default_rng(0).standard_normal((TABLE_STEPS, 3), np.float32)
        noise = NoiseStream(0, range(len(t)), x_t.shape[1:]).draw()
        estimates = []
        for row in range(len(t)):
            own = slice(row, row + 1)
            part = slice(None) if self._whole else own
            x, eps = x_t[part], noise[part]
            feeds = (x, x0_prev[part], np.array([row]), modulations, coefficients, eps)
            found = self._step.run(named(self._step.spec, feeds))
            x_next, x0_hat, number = (found[tensor.name] for tensor in self._step.spec.outputs)
            A, B, C = coefficients[row]
            self._note(x_next, A * x + B * x0_hat + C * eps, int(number[0]) == row + 1)
            estimates.append(x0_hat[own] if self._whole else x0_hat)
        return np.concatenate(estimates)

    def _note(self, x_next: Array, expected: Array, counted: bool) -> None:
        self.inexact += int(np.sum(x_next != expected)) + (not counted)
        self.elements += x_next.size + 1
        with np.errstate(all="ignore"):  # what overflows fails by its distance
            wrong = np.sum(np.square(x_next - expected, dtype=np.float64)) if counted else np.inf
            self._squares += wrong, np.sum(np.square(expected, dtype=np.float64))

    @property
    def distance(self) -> float:
        """Of x_next from the update, relative L2; infinite after a wrong next_step."""
        wrong, whole = self._squares
        return float(np.sqrt(wrong / whole))


def loop_questions(subject: Subject) -> Iterator[Measurement]:
    """Questions about the loop's two graphs, where the component has them."""
    if LOOP[1] not in subject.paths:
        return
    loop = LoopDenoiser(*map(subject.runner, LOOP))
    if subject.precision.is_float32:
        yield from subject.exact(Question.LOOP, subject.outputs(loop))
    else:
        yield from _rounded(subject, loop)
    yield subject.measurement(Question.UPDATE, ALL, loop.inexact / loop.elements, 0.0)


def _rounded(subject: Subject, loop: LoopDenoiser) -> Iterator[Measurement]:
    # Every sample is a call of its own, slow in the evaluator: of the batches, which have several
    # times, the one of a middle length.
    lengths = sorted({length for _, length in subject.cases})
    middle = lengths[len(lengths) // 2]
    cases = [case for case in subject.cases if case[0] == 1 or case[1] == middle]
    baseline = {case: subject.baseline[case] for case in cases}
    limit = precision_limit(pooled_distance(baseline, subject.expected).relative_l2)
    yield subject.pooled(Question.LOOP, subject.outputs(loop, cases), limit)
    if subject.also_in_ort:
        loaded = LoopDenoiser(*map(subject.in_ort, LOOP))
        yield subject.pooled(Question.LOOP_FILE, subject.outputs(loaded, cases), limit)
