"""What the questions of the proof are put to: one stage in one precision, and its inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.proof.baseline import runner, torchs_own
from engines.proof.compare import Comparison, compare
from engines.proof.gates import FORMULA_L2
from engines.proof.inputs import stage_inputs
from engines.proof.questions import Question
from engines.proof.records import Checkpoint, Distances, Measurement
from engines.proof.stress import stress_inputs
from engines.runtime.evaluator import EvaluatorStage
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array
from engines.runtime.torch import TorchStage
from export.precision import Precision
from export.stages import StageSpec, compared, stage
from ldlm.model import LDLM

Case = tuple[int, int]
# In place of a case: measured over all of them together.
ALL: Case = (0, 0)


@dataclass(frozen=True)
class Subject:
    """One stage in one precision, and what float32 PyTorch says about it.

    Attributes:
        spec: the traced stage of a component.
        paths: the graphs of the component's stages, by name.
        inputs, expected: per case.
        exact_limit: how far two float32 computations of the formula may be apart.
    """

    model: LDLM
    spec: StageSpec
    precision: Precision
    checkpoint: Checkpoint
    paths: Mapping[str, Path]
    inputs: Mapping[Case, tuple[Array, ...]]
    expected: Mapping[Case, Array]
    exact_limit: float = FORMULA_L2

    @classmethod
    def of(
        cls,
        model: LDLM,
        component: str,
        precision: Precision,
        cases: Sequence[Case],
        checkpoint: Checkpoint = "given",
        paths: Mapping[str, Path] | None = None,
    ) -> Subject:
        """A component in a precision, with inputs for each (batch, length)."""
        spec = compared(component)
        inputs = {case: stage_inputs(spec, model.config, *case) for case in cases}
        if checkpoint == "stress":
            inputs = {case: stress_inputs(spec, arrays) for case, arrays in inputs.items()}
        reference = TorchStage(model, spec)
        expected = {case: reference(*arrays) for case, arrays in inputs.items()}
        return cls(model, spec, precision, checkpoint, paths or {}, inputs, expected)

    def outputs(self, call: Callable[..., Array]) -> dict[Case, Array]:
        """What a runtime makes of the inputs, per case."""
        return {case: call(*arrays) for case, arrays in self.inputs.items()}

    def peer(self) -> dict[Case, Array]:
        """What PyTorch's own means make of them; see `engines.proof.baseline`.

        Raises:
            ParityError: nothing was rounded, so that the comparison would mean nothing.
        """
        return self.outputs(torchs_own(self.model, self.spec, self.precision))

    def in_ort(self, name: str) -> OrtStage:
        """A stage's graph in ONNX Runtime."""
        return OrtStage(self.paths[name], stage(name), self.model.config)

    def runner(self, name: str) -> EvaluatorStage | OrtStage:
        """A stage's graph where the precision shows; see `engines.proof.baseline.runner`."""
        return runner(self.paths[name], stage(name), self.model.config, self.precision)

    def measurement(
        self, question: Question, case: Case, found: float | Comparison, limit: float
    ) -> Measurement:
        """What was found about this subject."""
        where = (self.spec.name, str(self.precision), self.checkpoint, question)
        if not isinstance(found, Comparison):
            return Measurement(*where, *case, found, limit)
        detail = Distances(**dataclasses.asdict(found))
        return Measurement(*where, *case, found.relative_l2, limit, detail)

    def exact(self, question: Question, got: Mapping[Case, Array]) -> Iterator[Measurement]:
        """Every case, held to what is expected as closely as float32 agrees."""
        for case, array in got.items():
            distance = compare(array, self.expected[case])
            yield self.measurement(question, case, distance, self.exact_limit)

    def pooled(self, question: Question, got: Mapping[Case, Array], limit: float) -> Measurement:
        """All cases together, against what is expected."""
        return self.measurement(question, ALL, pooled(got, self.expected), limit)

    @property
    def ids_spec(self) -> StageSpec | None:
        """The stage of the component that gives token ids, where its graph is there."""
        specs = map(stage, self.paths)
        return next((spec for spec in specs if spec.outputs[0].dtype == "int64"), None)


def pooled(got: Mapping[Case, Array], reference: Mapping[Case, Array]) -> Comparison:
    """One distance over all cases: a handful of values at length 1 is no measure of rounding."""
    return against(*(np.concatenate([x[c].ravel() for c in got]) for x in (got, reference)))


def against(got: Array, reference: Array) -> Comparison:
    """`compare`, where the reference may be what overflows."""
    if np.all(np.isfinite(reference)):
        return compare(got, reference)
    return Comparison(np.inf, np.inf, np.inf, 0.0, int(np.sum(~np.isfinite(got))), got.size)
