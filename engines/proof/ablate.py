"""What does each island buy? Every one switched on and off, on both checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from engines.proof.inputs import clamped, stage_inputs
from engines.proof.records import Ablation, Checkpoint
from engines.proof.stage import peer_outputs
from engines.proof.stress import stress_inputs, stressed
from engines.proof.subject import Subject, against
from engines.runtime.evaluator import EvaluatorStage
from engines.runtime.torch import TorchStage
from export.exporter import export_stage
from export.precision import Precision
from export.stages import compared
from ldlm import files
from ldlm.errors import ConfigError
from ldlm.model import LDLM

Array = NDArray[Any]

CASE = (2, 64)


def ablate(
    model: LDLM, precision: Precision, component: str, progress: Callable[[str], None]
) -> Iterator[Ablation]:
    """Export a component with each of its islands in half, alone and all together.

    Args:
        model: a checkpoint, float32.
        precision: a half one.
        component: which.
        progress: told what is being done.

    Raises:
        ExportError, DiskSpaceError: as the export.
    """
    islands = precision.islands(component)
    copies: tuple[tuple[Checkpoint, LDLM], ...] = (("given", model), ("stress", stressed(model)))
    for checkpoint, copy in copies:
        bench = Bench(copy, checkpoint, precision, component)
        for off in dict.fromkeys(((), *((island,) for island in islands), tuple(islands))):
            without = " ".join(off) or "nothing"
            progress(f"{component} {precision}, {checkpoint} checkpoint, without {without}")
            yield bench.without(off)


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


class Bench:
    """One stage and its inputs, and what float32 and autocast make of them."""

    def __init__(
        self, model: LDLM, checkpoint: Checkpoint, precision: Precision, component: str
    ) -> None:
        self.spec = compared(component)
        self.model, self.checkpoint, self.precision = model, checkpoint, precision
        case = clamped(CASE, model.config)
        arrays = stage_inputs(self.spec, model.config, *case)
        self.inputs = stress_inputs(self.spec, arrays) if checkpoint == "stress" else arrays
        self.expected = TorchStage(model, self.spec)(*self.inputs)
        subject = Subject(
            model, self.spec, self.precision, checkpoint, {}, {case: self.inputs},
            {case: self.expected},
        )  # fmt: skip
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
            self.spec.name, str(self.precision), self.checkpoint, tuple(off), error, self.autocast
        )
