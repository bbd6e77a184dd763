"""What does each island buy? Every one switched on and off, on both checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engines.proof.inputs import clamped
from engines.proof.records import Ablation, Checkpoint
from engines.proof.stress import stressed
from engines.proof.subject import Case, Subject, pooled
from engines.runtime.evaluator import EvaluatorStage
from engines.runtime.stage import Array
from export.exporter import export_stage
from export.precision import Precision
from ldlm import files
from ldlm.errors import ConfigError
from ldlm.model import LDLM

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
        case = clamped(CASE, model.config)
        subject = Subject.of(copy, component, precision, [case], checkpoint)
        where = (subject.spec.name, str(precision), checkpoint)
        autocast = pooled(subject.peer(), subject.expected).relative_l2
        for off in dict.fromkeys(((), *((island,) for island in islands), tuple(islands))):
            without = " ".join(off) or "nothing"
            progress(f"{component} {precision}, {checkpoint} checkpoint, without {without}")
            error = pooled(_without(subject, off), subject.expected).relative_l2
            yield Ablation(*where, off, error, autocast)


def _without(subject: Subject, off: Sequence[str]) -> dict[Case, Array]:
    """What the stage's file computes with these islands in half."""
    spec, model = subject.spec, subject.model
    with files.staging_folder(Path(tempfile.gettempdir())) as staging:
        graphs = export_stage(model, spec.name, subject.precision.without(off), staging)
        (graph,) = (g for g in graphs if g.spec == spec)
        return subject.outputs(EvaluatorStage(graph.path, spec, model.config))


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
