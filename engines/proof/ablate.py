"""What does each island buy? Every one switched on and off, on fresh and on stress weights."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from engines.proof.gates import AUTOCAST_RATIO
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.stage import peer_outputs
from engines.proof.stress import stress_inputs, stressed
from engines.proof.subject import Subject, against
from engines.runtime.evaluator import EvaluatorStage
from engines.runtime.torch import TorchStage
from export.exporter import export_stage
from export.precision import Precision
from export.stages import StageSpec, compared
from ldlm import files
from ldlm.errors import ConfigError
from ldlm.model import LDLM

Array = NDArray[Any]

CASE = (2, 64)


@dataclass(frozen=True)
class Ablation:
    """One stage in one half precision with some of its islands switched off.

    Attributes:
        weights: "given" or "stress".
        off: the islands that are in half.
        error: relative L2 from float32 PyTorch; infinite where the graph overflows.
        autocast: the same of PyTorch's autocast.
    """

    stage: str
    precision: str
    weights: str
    off: tuple[str, ...]
    error: float
    autocast: float

    @property
    def ratio(self) -> float:
        """The error in units of autocast's."""
        return self.error / self.autocast if self.autocast else math.inf

    @property
    def passed(self) -> bool:
        """Whether the gate of the precision would hold."""
        return self.ratio <= AUTOCAST_RATIO

    def record(self) -> dict[str, Any]:
        """For parity.json."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "passed": self.passed}


def ablate(
    model: LDLM,
    precisions: Sequence[str],
    parts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Ablation]:
    """Export every stage with each of its islands in half, alone and all together.

    Args:
        model: a checkpoint, float32.
        precisions: of these, the half ones.
        parts: components.
        progress: told what is being done.

    Raises:
        ConfigError: no half precision among them.
        ExportError, DiskSpaceError: as the export.
    """
    rows = []
    half = half_ones(precisions)
    for kind, weights in (("given", model), ("stress", stressed(model))):
        for name in half:
            for part in parts:
                rows += list(_stage(weights, kind, name, part, progress))
    return rows


def half_ones(precisions: Sequence[str]) -> list[str]:
    """The half precisions among these.

    Raises:
        ConfigError: there is none.
    """
    half = [n for n in precisions if Precision.of(n).is_half]
    if not half:
        raise ConfigError(
            "there is no half precision to ablate",
            expected="fp16 or bf16",
            got=", ".join(precisions),
            remedy="export one, and name it",
        )
    return half


def _stage(
    model: LDLM, kind: str, precision: str, weights: str, progress: Callable[[str], None]
) -> Iterator[Ablation]:
    bench = Bench(model, kind, precision, weights)
    islands = Precision.of(precision).islands(weights)
    for off in dict.fromkeys(((), *((island,) for island in islands), tuple(islands))):
        progress(f"{weights} {precision}, {kind} weights, without {' '.join(off) or 'nothing'}")
        yield bench.without(off)


class Bench:
    """One stage, its weights and inputs, and what float32 and autocast make of them."""

    def __init__(self, model: LDLM, kind: str, precision: str, weights: str) -> None:
        self.spec: StageSpec = compared(weights)
        self.model, self.kind, self.precision = model, kind, Precision.of(precision)
        case = clamped(CASE, model.config)
        arrays = stage_inputs(self.spec, model.config, *case)
        self.inputs = stress_inputs(self.spec, arrays) if kind == "stress" else arrays
        self.expected = TorchStage(model, self.spec)(*self.inputs)
        subject = Subject(
            model, self.spec, self.precision, kind, {}, {case: self.inputs}, {case: self.expected}
        )
        self.autocast = against(peer_outputs(subject)[case], self.expected).relative_l2

    def without(self, off: Sequence[str]) -> Ablation:
        """Export the stage with these islands in half, and evaluate the file."""
        name = self.precision.without(off)
        with files.staging_folder(Path(tempfile.gettempdir())) as staging:
            graphs = export_stage(self.model, self.spec.name, name, staging)
            (graph,) = (g for g in graphs if g.spec == self.spec)
            got = EvaluatorStage(graph.path, self.spec, self.model.config)(*self.inputs)
        error = against(got, self.expected).relative_l2
        return Ablation(
            self.spec.name, str(self.precision), self.kind, tuple(off), error, self.autocast
        )
