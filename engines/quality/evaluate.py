"""How good is the text? A judge's verdict for every runtime and precision, on the same noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.artifacts.manifest import QUALITY, Manifest
from engines.proof.records import identity
from engines.quality.judge import Judge
from engines.runtime.load import load_stages, load_tokenizer, require_runtime
from export.precision import Precision
from export.stages import components
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.sampler import SampleRequest, sample

Ids = NDArray[np.int64]
Progress = Callable[[str, int, int], None]

# z of a 95 % interval.
Z = 1.959964


# What is judged unless asked otherwise: every machine has it.
JUDGED = ("ort", "evaluator")


@dataclass(frozen=True)
class Share:
    """A share of the samples, with the ends of its 95 % interval (Wilson)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Share:
        """The share count / total."""
        if not total:
            return cls(0.0, 0.0, 1.0)
        p, z2 = count / total, Z * Z / total
        middle = (p + z2 / 2) / (1 + z2)
        half = Z / (1 + z2) * math.sqrt(p * (1 - p) / total + z2 / (4 * total))
        low, high = max(0.0, middle - half), min(1.0, middle + half)
        return cls(p, low if count else 0.0, high if count < total else 1.0)


@dataclass(frozen=True)
class Quality:
    """The verdict on one runtime in one precision.

    Attributes:
        accepted: share of texts that the judge accepts.
        unseen: share of the accepted texts that are not in the training set.
        distinct: number of different texts.
        mean_words: words per text.
        agreement: share of tokens that are float32 PyTorch's, up to the end of the longer text.
        same: share of texts that are float32 PyTorch's.
    """

    runtime: str
    precision: str
    samples: int
    accepted: Share
    unseen: Share
    distinct: int
    mean_words: float
    agreement: float
    same: float


def runs_of(precisions: Sequence[str], runtimes: Sequence[str]) -> list[tuple[str, str]]:
    """(runtime, precision) of what is asked and can sample; PyTorch, the reference, is first.

    ONNX Runtime's CPU provider has no bf16, and nothing else has int8; the evaluator has nothing to
    say on float32.

    Raises:
        ConfigError: no such runtime.
    """
    for name in runtimes:
        require_runtime(name)
    runs = [("torch", "fp32")]
    for name in precisions:
        precision = Precision.of(name)
        # In float32 the evaluator rounds nothing: it has nothing to say.
        left_out = ("torch", "evaluator") if precision.is_float32 else ("torch",)
        runs += [
            (runtime, name)
            for runtime in runtimes
            if runtime not in left_out and precision.runs_on(runtime)
        ]
    return runs


def evaluate(
    folder: Path,
    manifest: Manifest,
    checkpoint: Path,
    precisions: Sequence[str],
    request: SampleRequest,
    judge: Judge,
    progress: Progress,
    runtimes: Sequence[str] = JUDGED,
) -> list[Quality]:
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
    tokenizer = load_tokenizer(folder, manifest)
    for name in precisions:  # before the first minute is spent
        for component in components():
            manifest.require_graphs(name, component)
    end = tokenizers.end_id(tokenizer, manifest.config.end_of_text)
    reference: Ids | None = None
    found = []
    for runtime, precision in runs_of(precisions, runtimes):
        stages = load_stages(
            folder, manifest, runtime=runtime, precision=precision, checkpoint=checkpoint
        )
        label = f"{runtime} {precision}"
        ids = sample(stages, request, lambda n, m, label=label: progress(label, n, m))  # type: ignore[misc]
        reference = ids if reference is None else reference
        texts = [
            tokenizers.decode(tokenizer, row, manifest.config.end_of_text) for row in ids.tolist()
        ]
        count = len(texts)
        good = [text for text in texts if judge.accepts(text)]
        equal = (ids == reference) | ~_before_end(ids, reference, end)
        found.append(
            Quality(
                runtime=runtime,
                precision=precision,
                samples=count,
                accepted=Share.of(len(good), count),
                unseen=Share.of(sum(text not in judge.seen for text in good), len(good)),
                distinct=len(set(texts)),
                mean_words=float(np.mean([len(text.split()) for text in texts])),
                agreement=float(np.mean(equal[_before_end(ids, reference, end)])),
                same=float(np.mean(equal.all(axis=1))),
            )
        )
    return found


def _before_end(ids: Ids, reference: Ids, end: int) -> NDArray[np.bool_]:
    """Which positions [samples, T] belong to either text: its words and its end."""
    inside = np.zeros(ids.shape, bool)
    for tokens in (ids, reference):
        ended = np.cumsum(tokens == end, axis=1)
        inside |= (ended == 0) | ((ended == 1) & (tokens == end))
    return inside


def save(
    folder: Path, manifest: Manifest, rows: Sequence[Quality], request: SampleRequest
) -> dict[str, Any]:
    """Write quality.json, and return what is in it: the verdict, and on which graphs."""
    graphs = {
        f"{entry.precision}/{entry.stage}": identity(entry)
        for entry in manifest.graphs
        if entry.precision in {row.precision for row in rows}
    }
    document = {
        "checkpoint": manifest.checkpoint,
        "graphs": graphs,
        "steps": request.steps,
        "solver": request.solver,
        "seed": request.seed,
        "length": request.length,
        "rows": [asdict(row) for row in rows],
    }
    files.write_whole(folder / QUALITY, json.dumps(document, indent=1).encode())
    return document
