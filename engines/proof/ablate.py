"""What does each island buy? Every one switched on and off, on both checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engines.proof.records import Ablation
from engines.proof.subject import Subject, pooled

CASE = (2, 64)


def ablate(subject: Subject) -> Iterator[Ablation]:
    """Export a component with each of its islands in half, alone and all together.

    Args:
        subject: in a half precision; of any other there is nothing to say.

    Raises:
        ExportError, DiskSpaceError: as `Subject.exported`.
    """
    if not subject.precision.is_half:
        return
    islands = subject.precision.islands(subject.spec.component)
    for whole in (subject.at(CASE), subject.stressed().at(CASE)):
        for off in dict.fromkeys(((), *((island,) for island in islands), tuple(islands))):
            whole.tell(f"{whole.checkpoint} checkpoint, without {' '.join(off) or 'nothing'}")
            with replace(whole, precision=whole.precision.without(off)).exported() as experiment:
                outputs = whole.outputs(experiment.runner(whole.spec.name))
            yield Ablation(
                stage=whole.spec.name,
                precision=str(whole.precision),
                checkpoint=whole.checkpoint,
                off=off,
                error=pooled(outputs, whole.expected).relative_l2,
                autocast=whole.baseline_error.relative_l2,
            )
