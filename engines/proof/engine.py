"""The question about compiled engines: on this GPU, do they compute what PyTorch computes?

Of the denoiser, the loop's two engines behind its interface. What is compared is the third run of
a case, which replays a captured CUDA graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from engines.artifacts.manifest import Manifest
from engines.proof.gates import FORMULA_L2, NEAR_TIE_FLOAT32, NEAR_TIE_HALF, precision_limit
from engines.proof.loop import LoopDenoiser
from engines.proof.questions import Question
from engines.proof.records import Measurement
from engines.proof.stage import other_choice
from engines.proof.subject import ALL, Case, Subject, pooled
from engines.runtime.stage import Array
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_stage import TrtStage
from export.precision import Precision
from export.stages import LOOP, compiled, stage
from ldlm.model import LDLM

RUNS = 3  # plain, captured, replayed


def engine_questions(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: Sequence[str],
    runtime: TrtRuntime,
    chosen: Sequence[str],
    cases: Sequence[Case],
    progress: Callable[[str], None],
) -> Iterator[Measurement]:
    """Compare the engines of the chosen components with the reference model, on this GPU.

    Raises:
        ArtifactError: an engine was not built, not for this GPU, or has changed.
        EngineRunError, StageInputError: it cannot be run.
    """
    for component in chosen:
        names = compiled(component)
        for precision in precisions if names else ():
            progress(f"{component} {precision}, engine")
            subject = Subject.of(model, component, Precision.of(precision), cases)
            with contextlib.ExitStack() as closing:
                stages = [
                    closing.enter_context(
                        TrtStage.from_artifacts(runtime, folder, manifest, name, precision)
                    )
                    for name in names
                ]
                loop = LoopDenoiser(*stages, whole=True) if names == list(LOOP) else None
                call: Callable[..., Array] = loop or stages[0]
                outputs = {
                    case: [call(*arrays) for _ in range(RUNS)][-1]
                    for case, arrays in subject.inputs.items()
                }
            yield from _judge(subject, outputs, ids=stage(names[0]).outputs[0].dtype == "int64")
            if loop is not None:  # a device may contract the update
                yield subject.measurement(Question.ENGINE_UPDATE, ALL, loop.distance, FORMULA_L2)


def _judge(subject: Subject, outputs: Mapping[Case, Array], *, ids: bool) -> Iterator[Measurement]:
    if subject.precision.is_float32:
        limit = FORMULA_L2
        squares = np.concatenate([x.ravel() for x in subject.expected.values()]) ** 2
        tie = NEAR_TIE_FLOAT32 * float(np.sqrt(squares.mean()))
    else:
        theirs = pooled(subject.peer(), subject.expected)
        limit, tie = precision_limit(theirs.relative_l2), NEAR_TIE_HALF * theirs.max_abs
    if not ids:
        yield subject.pooled(Question.ENGINE, outputs, limit)
        return
    for case, chosen in outputs.items():
        wrong = other_choice(subject.expected[case], chosen, tie)
        yield subject.measurement(Question.ENGINE, case, float(wrong.mean()), 0.0)
