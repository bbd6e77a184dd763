"""Would we notice? Every gate is run on graphs damaged in every way we know."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from engines.artifacts.manifest import Manifest
from engines.proof import islands
from engines.proof.compare import compare
from engines.proof.gates import FORMULA_L2
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.questions import Question
from engines.proof.records import UNDAMAGED, Outcome
from engines.proof.sabotage.damages import DAMAGES, Damage
from engines.proof.stage import rounding_off
from engines.runtime.ort import OrtStage
from engines.runtime.torch import TorchStage
from export.checks import check_graph
from export.exporter import OPSET
from export.passes.widen import widen
from export.precision import POLICIES, Precision, apply, without_rounding
from export.stages import stage
from ldlm import files
from ldlm.errors import ArtifactError, ConfigError, GraphCheckError
from ldlm.model import LDLM

CASE = (2, 17)


def self_test(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precision: Precision,
    component: str,
    progress: Callable[[str], None],
) -> Iterator[Outcome]:
    """Damage a component's exported graphs, one fault at a time, and put the questions to each.

    Three questions: the graph checks of the export, the islands of the policy, and the formula
    (for fp32, the file against PyTorch; for a half precision, with rounding switched off).

    Args:
        folder, manifest, model, progress: as for `engines.proof.verify.verify`.
        precision, component: which; see `require_policies`.

    Raises:
        ArtifactError: a damage finds nothing to damage.
    """
    for name in dict.fromkeys(damage.stage for damage in DAMAGES):
        if stage(name).component == component:
            progress(f"self-test {precision} {name}")
            yield from _Bench(folder, manifest, model, precision, name).run()


def require_policies(precisions: Sequence[str]) -> None:
    """Refuse experiments, where what a damage would turn to half may be half, and integers.

    Raises:
        ConfigError: naming the first.
    """
    for name in precisions:
        precision = Precision.of(name)
        precision.require_floats("the self-test is")
        if precision.is_experiment:
            raise ConfigError(
                "the self-test is for the policies, not for an experiment",
                expected=" or ".join(POLICIES),
                got=name,
            )


class _Bench:
    """One stage in one precision, its intact graph at hand."""

    def __init__(
        self, folder: Path, manifest: Manifest, model: LDLM, precision: Precision, name: str
    ) -> None:
        self.config, self.precision, self.spec = model.config, precision, stage(name)
        self.path = manifest.graph(str(precision), name).verified(folder)
        self.module = apply(self.spec.torch(model), self.spec.component, self.precision)
        self.inputs = stage_inputs(self.spec, model.config, *clamped(CASE, model.config))
        plain = without_rounding(self.module)
        self.expected = TorchStage(model, self.spec, plain)(*self.inputs)

    def run(self) -> Iterator[Outcome]:
        # Damaged graphs stand beside the weights they read, under a name that is swept up.
        beside = self.path.with_name(f"{files.PARTIAL}{os.getpid()}-{self.path.name}")
        intact = Damage(UNDAMAGED, self.spec.name, lambda _: None)
        with files.staging_folder(Path(tempfile.gettempdir())) as staging:
            wide = rounding_off(self.path, staging / "wide.onnx")
            try:
                for damage in (intact, *DAMAGES):
                    if damage.stage == self.spec.name:
                        noticed = tuple(self._noticed(beside, wide, damage))
                        yield Outcome(damage.stage, str(self.precision), damage.name, noticed)
            finally:
                beside.unlink(missing_ok=True)

    def _noticed(self, beside: Path, wide: Path, damage: Damage) -> Iterator[str]:
        graph = ir.load(self.path)
        damage.apply(graph)
        ir.save(graph, beside)
        try:
            check_graph(beside, self.spec, self.config, self.module, self.precision, OPSET)
        except GraphCheckError:
            yield "checks"
        records = islands.look(beside, self.spec, self.precision, tensorrt=False)
        if not all(record.passed for record in records):
            yield "islands"
        graph = ir.load(wide)
        damage.apply(graph)
        widen(graph)  # what the damage turned to half is for the islands to notice
        ir.save(graph, damaged := wide.with_name("damaged.onnx"))
        if self._formula_differs(damaged):
            yield Question.GRAPH if self.precision.is_float32 else Question.FORMULA

    def _formula_differs(self, path: Path) -> bool:
        try:
            got = OrtStage(path, self.spec, self.config)(*self.inputs)
        except ArtifactError:  # it does not even load
            return True
        if self.spec.outputs[0].dtype == "int64":
            return not np.array_equal(got, self.expected)
        return not compare(got, self.expected).relative_l2 <= FORMULA_L2
