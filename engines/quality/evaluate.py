"""How good is the text? A judge's verdict for every runtime and precision, on the same noise.

The judge is a Python file of the user's own.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.artifacts.manifest import Manifest
from engines.proof.saved import identity
from engines.quality.records import Quality, QualityReport, Share
from engines.runtime.load import load_stages, load_tokenizer, require_runtime
from export.precision import Precision
from export.stages import components
from ldlm import tokenizer as tokenizers
from ldlm.errors import ConfigError
from ldlm.sampler import SampleRequest, sample

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

# What is judged unless asked otherwise: every machine has it.
JUDGED = ("ort", "evaluator")


@dataclass(frozen=True)
class Judge:
    """What decides about a text.

    Attributes:
        accepts: whether a text is right.
        seen: the texts that the model was trained on.
    """

    accepts: Callable[[str], bool]
    seen: Collection[str]


def load_judge(path: Path) -> Judge:
    """A judge from a Python file that defines `accepts(text)` and `seen()`.

    `accepts` says whether a text is right; `seen` returns the texts that were trained on. The file
    is executed: it is the user's own.

    Raises:
        ConfigError: it is not there, does not run, or does not define both.
    """
    spec = importlib.util.spec_from_file_location("judge", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError("no judge there", expected="a Python file, *.py", got=path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a judge may have files beside it
    try:
        spec.loader.exec_module(module)
        judge = Judge(module.accepts, frozenset(module.seen()))
        judge.accepts("")
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(
            f"{path} is not a usable judge",
            expected="a file that defines accepts(text) -> bool and seen() -> texts",
            got=f"{type(error).__name__}: {error}",
            remedy="mend the file, or install what it imports",
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return judge


def runs_of(precisions: Sequence[str], runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """(runtime, precision) of what is asked and can sample; PyTorch, the reference, is first.

    ONNX Runtime's CPU provider has no bf16, and nothing else has int8; the evaluator has nothing to
    say on float32, in which it rounds nothing.

    Raises:
        ConfigError: no such runtime.
    """
    for name in runtimes:
        require_runtime(name)
    runs = [("torch", "fp32")]
    for precision in map(Precision.of, precisions):
        left_out = ("torch", "evaluator") if precision.is_float32 else ("torch",)
        able = (name for name in runtimes if name not in left_out and precision.runs_on(name))
        runs += [(name, str(precision)) for name in able]
    return runs


def evaluate(
    folder: Path,
    manifest: Manifest,
    checkpoint: Path,
    precisions: Sequence[str],
    request: SampleRequest,
    judge: Judge,
    progress: Callable[[str, int, int], None],
    runtimes: Sequence[str] = JUDGED,
) -> QualityReport:
    """Sample the same noise on every runtime and precision, and let the judge decide.

    Args:
        folder, manifest: the artifacts.
        checkpoint: what they were made from; float32 PyTorch on it is the reference.
        precisions: of the exported ones.
        request: what to sample.
        judge: of the texts.
        progress: told (what, step, steps).
        runtimes: beside PyTorch; "rtx" and "trt" need a GPU.

    Raises:
        ConfigError, ProviderError: a runtime that there is not, or not here.
        ArtifactError, SamplerError: as loading and sampling.
    """
    tokenizer, end_of_text = load_tokenizer(folder, manifest), manifest.config.end_of_text
    end = tokenizers.end_id(tokenizer, end_of_text)
    for name in precisions:  # before the first minute is spent
        for component in components():
            manifest.require_graphs(name, component)
    reference: Ids | None = None
    rows = []
    for runtime, name in runs_of(precisions, runtimes):
        stages = load_stages(
            folder, manifest, runtime=runtime, precision=name, checkpoint=checkpoint
        )
        ids = sample(stages, request, functools.partial(progress, f"{runtime} {name}"))
        reference = ids if reference is None else reference
        texts = [tokenizers.decode(tokenizer, row, end_of_text) for row in ids.tolist()]
        inside = before_end(ids, reference, end)
        rows.append(_quality((runtime, name), texts, judge, inside, ids == reference))
    return _report(manifest, rows, request)


def _report(manifest: Manifest, rows: Sequence[Quality], request: SampleRequest) -> QualityReport:
    judged = {row.precision for row in rows}
    graphs = [entry for entry in manifest.graphs if entry.precision in judged]
    return QualityReport(
        checkpoint=manifest.checkpoint,
        graphs={f"{entry.precision}/{entry.stage}": identity(entry) for entry in graphs},
        steps=request.steps,
        solver=request.solver,
        seed=request.seed,
        length=request.length,
        rows=tuple(rows),
    )


def _quality(
    run: tuple[str, str], texts: Sequence[str], judge: Judge, inside: Mask, equal: Mask
) -> Quality:
    good = [text for text in texts if judge.accepts(text)]
    return Quality(
        *run,
        samples=len(texts),
        accepted=Share.of(len(good), len(texts)),
        unseen=Share.of(sum(text not in judge.seen for text in good), len(good)),
        distinct=len(set(texts)),
        mean_words=float(np.mean([len(text.split()) for text in texts])),
        agreement=float(np.mean(equal[inside])),
        same=float(np.mean((equal | ~inside).all(axis=1))),
    )


def before_end(ids: Ids, reference: Ids, end: int) -> Mask:
    """Which positions [samples, T] belong to either text: its words and its end."""
    inside = np.zeros(ids.shape, bool)
    for tokens in (ids, reference):
        ended = np.cumsum(tokens == end, axis=1)
        inside |= (ended == 0) | ((ended == 1) & (tokens == end))
    return inside
