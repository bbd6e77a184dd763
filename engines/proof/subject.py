"""What the questions of the proof are put to: one stage in one precision, and its inputs."""

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import nn

from engines.proof.baseline import torchs_own
from engines.proof.compare import Comparison, compare
from engines.proof.gates import FLOAT64_RATIO, FORMULA_L2
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.questions import Question
from engines.proof.records import Checkpoint, Distances, Measurement
from engines.proof.stress import stress_inputs
from engines.runtime.ort import OrtStage
from engines.runtime.stage import Array
from engines.runtime.torch import EvaluatorStage, TorchStage
from export.exporter import export_stage
from export.precision import Precision, apply, without_rounding
from export.stages import MAX_BATCH, StageSpec, stage
from ldlm import files
from ldlm.model import LDLM

Case = tuple[int, int]
# In place of a case: measured over all of them together.
ALL: Case = (0, 0)


@dataclass(frozen=True)
class Subject:
    """One stage in one precision: its graphs, its inputs, and what PyTorch makes of them.

    What was computed stays as long as the subject: one that has cases (`at`) is for one question.

    Attributes:
        model: the reference, float32.
        spec: the stage that is compared.
        precision: what the graphs should be.
        paths: the graphs of the component's stages, by name.
        checkpoint: what `model` is.
        cases: (batch, length) of the inputs.
        progress: told what is being done.
    """

    model: LDLM
    spec: StageSpec
    precision: Precision
    paths: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    checkpoint: Checkpoint = "given"
    cases: tuple[Case, ...] = ()
    progress: Callable[[str], None] = lambda _: None

    def tell(self, what: str) -> None:
        """Say what is being done with it."""
        self.progress(f"{self.spec.component} {self.precision}, {what}")

    def at(self, *cases: Case, largest: int = MAX_BATCH) -> Self:
        """The same with these inputs, where the model has positions for them; see `clamped`."""
        possible = (clamped(case, self.model.config, largest) for case in cases)
        return replace(self, cases=tuple(dict.fromkeys(possible)))

    def stressed(self, model: LDLM) -> Self:
        """The same of `model`, a stressed copy of its own; its graphs are still to be exported."""
        return replace(self, model=model, checkpoint="stress", paths={})

    @contextlib.contextmanager
    def exported(self, parent: Path | None = None) -> Iterator[Self]:
        """The same on graphs that stand for a while in `parent`, or where the system keeps such.

        Raises:
            ExportError, DiskSpaceError: as the export.
        """
        with files.staging_folder(parent or Path(tempfile.gettempdir())) as folder:
            graphs = export_stage(self.model, self.spec.name, self.precision, folder)
            yield replace(self, paths={graph.spec.name: graph.path for graph in graphs})

    @cached_property
    def inputs(self) -> dict[Case, tuple[Array, ...]]:
        """The inputs of every case."""
        inputs = {case: stage_inputs(self.spec, self.model.config, *case) for case in self.cases}
        if self.checkpoint == "given":
            return inputs
        return {case: stress_inputs(self.spec, arrays) for case, arrays in inputs.items()}

    def outputs(
        self, call: Callable[..., Array], cases: Iterable[Case] | None = None
    ) -> dict[Case, Array]:
        """What a runtime makes of the inputs of these cases, or of all."""
        return {case: call(*self.inputs[case]) for case in cases or self.cases}

    @cached_property
    def expected(self) -> dict[Case, Array]:
        """What float32 PyTorch makes of them."""
        return self.outputs(TorchStage(self.model, self.spec))

    @cached_property
    def baseline(self) -> dict[Case, Array]:
        """What PyTorch's own means make of them; see `engines.proof.baseline`.

        Raises:
            ParityError: nothing was rounded, so that the comparison would mean nothing.
        """
        return self.outputs(torchs_own(self.model, self.spec, self.precision))

    @cached_property
    def baseline_error(self) -> Comparison:
        """How far that is from float32, over all cases: what this precision is held to."""
        return pooled_distance(self.baseline, self.expected)

    @cached_property
    def exact_limit(self) -> float:
        """How far two float32 computations of the formula may be apart.

        On stress weights it comes from float32's own distance from float64.
        """
        if self.checkpoint == "given":
            return FORMULA_L2
        exact = copy.deepcopy(self.spec.torch(self.model)).double()
        with torch.inference_mode():
            outputs = self.outputs(
                lambda *arrays: exact(*(torch.from_numpy(a).double() for a in arrays)).numpy()
            )
        errors = [compare(self.expected[case], outputs[case]).relative_l2 for case in outputs]
        return max(FORMULA_L2, FLOAT64_RATIO * max(errors))

    @cached_property
    def lowered(self) -> nn.Module:
        """The stage's module with the precision's policy applied."""
        return apply(self.spec.torch(self.model), self.spec.component, self.precision).eval()

    def unrounded(self) -> TorchStage:
        """Float32 PyTorch on the weights that the policy has rounded."""
        return TorchStage(self.model, self.spec, without_rounding(self.lowered))

    def in_ort(self, name: str) -> OrtStage:
        """The graph of a stage of the component in ONNX Runtime."""
        return OrtStage(self.paths[name], stage(name), self.model.config)

    def runner(self, name: str) -> EvaluatorStage | OrtStage:
        """The same where its precision shows: a half one in the evaluator."""
        if not self.precision.is_half:
            return self.in_ort(name)
        return EvaluatorStage(self.paths[name], stage(name), self.model.config)

    @property
    def also_in_ort(self) -> bool:
        """Whether ONNX Runtime's CPU provider too runs the files of this half precision."""
        return self.precision.is_half and self.precision.runs_on("ort")

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
        return self.measurement(question, ALL, pooled_distance(got, self.expected), limit)


def pooled_distance(got: Mapping[Case, Array], reference: Mapping[Case, Array]) -> Comparison:
    """One distance over all cases of `got`: a handful of values at length 1 is no measure."""
    return against(*(np.concatenate([x[c].ravel() for c in got]) for x in (got, reference)))


def against(got: Array, reference: Array) -> Comparison:
    """`compare`, where the reference may be what overflows."""
    if np.all(np.isfinite(reference)):
        return compare(got, reference)
    return Comparison(np.inf, np.inf, np.inf, 0.0, int(np.sum(~np.isfinite(got))), got.size)
