"""The question about compiled engines: on this GPU, do they compute what PyTorch computes?

Of the denoiser, the loop's two engines behind its interface. What is compared is the third run of
a case, which replays a captured CUDA graph.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from engines.artifacts.manifest import Manifest
from engines.proof.gates import FORMULA_L2, precision_limit
from engines.proof.loop import LoopDenoiser
from engines.proof.questions import Question
from engines.proof.records import Measurement
from engines.proof.stage import other_choice
from engines.proof.subject import ALL, Subject
from engines.runtime.stage import Array
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_stage import TrtStage
from export.stages import LOOP, compiled, stage

RUNS = 3  # plain, captured, replayed


def engine_questions(
    subject: Subject, folder: Path, manifest: Manifest, runtime: TrtRuntime
) -> Iterator[Measurement]:
    """Compare the engines of a component with the reference model, on this GPU.

    Args:
        subject: the component in a precision, with cases that the engines were built for.
        folder, manifest: where the engines are.
        runtime: runs them.

    Raises:
        ArtifactError: an engine was not built, not for this GPU, or has changed.
        EngineRunError, StageInputError: it cannot be run.
    """
    names = compiled(subject.spec.component)
    subject.tell("engine")
    with contextlib.ExitStack() as closing:
        engines = [
            closing.enter_context(
                TrtStage.from_artifacts(runtime, folder, manifest, name, str(subject.precision))
            )
            for name in names
        ]
        loop = LoopDenoiser(*engines, whole=True) if names == list(LOOP) else None
        call: Callable[..., Array] = loop or engines[0]
        outputs = subject.outputs(lambda *arrays: [call(*arrays) for _ in range(RUNS)][-1])
    if stage(names[0]).outputs[0].dtype == "int64":
        for case, ids in outputs.items():
            wrong = other_choice(subject, case, ids)
            yield subject.measurement(Question.ENGINE, case, float(wrong.mean()), 0.0)
    elif subject.precision.is_float32:
        yield subject.pooled(Question.ENGINE, outputs, FORMULA_L2)
    else:
        limit = precision_limit(subject.baseline_error.relative_l2)
        yield subject.pooled(Question.ENGINE, outputs, limit)
    if loop is not None:  # a device may contract the update
        yield subject.measurement(Question.ENGINE_UPDATE, ALL, loop.distance, FORMULA_L2)
