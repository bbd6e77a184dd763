"""The first proof: every exported graph against PyTorch, on sizes that differ from the example.

For float32, one question: does the file compute the model? For a half precision, three numbers,
because ONNX Runtime's CPU kernels compute fp16 in float32 and would hide its errors:

    formula     the file with rounding switched off, against float32 PyTorch with the same rounded
                weights: it must agree as closely as float32 does
    precision   the policy's own module in PyTorch, rounding at every tensor, against float32: at
                most 1.25 times the error of PyTorch's autocast
    file        the file itself in ONNX Runtime: it loads, runs, and is no worse than that
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from engines.manifest import PARITY, Manifest
from engines.proof.compare import Comparison, compare
from engines.proof.gates import AUTOCAST_RATIO, CASES, FORMULA_L2, NEAR_TIE
from engines.proof.half import HalfProducts
from engines.proof.inputs import stage_inputs
from engines.runtime.ort import OrtStage
from engines.runtime.torch_stage import TorchStage
from export import precision as policies
from export.passes.widen import widen
from export.stages import DEPLOYED, STAGES, StageSpec
from ldlm import files
from ldlm.errors import ParityError
from ldlm.model import LDLM

Array = NDArray[Any]
Case = tuple[int, int]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Line:
    """One measurement and its gate.

    Attributes:
        question: "graph" (float32), "formula", "precision", "file", or "tokens".
        distance: relative L2; for tokens, the share that differs and is no near-tie.
        limit: what the gate allows.
        detail: all distances, where arrays were compared.
    """

    stage: str
    precision: str
    question: str
    batch: int
    length: int
    distance: float
    limit: float
    detail: Comparison | None = None

    @property
    def passed(self) -> bool:
        """Whether the gate holds; NaN fails."""
        return self.distance <= self.limit


@dataclass
class Parity:
    """All lines, and the graphs that they speak of."""

    lines: list[Line]
    graphs: dict[str, str]

    def failures(self) -> list[Line]:
        """Lines whose gate does not hold."""
        return [line for line in self.lines if not line.passed]

    def save(self, folder: Path) -> None:
        """Write parity.json, whole or not at all."""
        document = {
            "passed": not self.failures(),
            "graphs": self.graphs,
            "lines": [{**dataclasses.asdict(line), "passed": line.passed} for line in self.lines],
        }
        # JSON has no infinity; the distance of an array with NaN in it is written as null.
        text = json.dumps(_finite(document), indent=1, allow_nan=False)
        files.write_whole(folder / PARITY, text.encode())

    def require_passed(self) -> None:
        """Fail on the first line whose gate does not hold.

        Raises:
            ParityError: naming it.
        """
        failures = self.failures()
        if failures:
            worst = failures[0]
            raise ParityError(
                f"{len(failures)} of {len(self.lines)} parity lines fail; the first is "
                f"'{worst.question}' in {worst.precision}",
                stage=worst.stage,
                tensor=f"batch {worst.batch}, length {worst.length}",
                expected=f"at most {worst.limit:.3g}",
                got=f"{worst.distance:.3g}",
                remedy=f"every line is in {PARITY}",
            )


def verify(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: list[str],
    progress: Progress = lambda _: None,
) -> Parity:
    """Compare every graph of the given precisions with the reference model.

    Args:
        folder, manifest: the artifacts.
        model: the checkpoint they were made from, float32.
        precisions: which of the exported precisions.
        progress: told what is being done.

    Raises:
        ArtifactError: a graph was not exported, or its files have changed.
    """
    lines: list[Line] = []
    for weights in DEPLOYED:
        specs = [spec for spec in STAGES if spec.weights == weights]
        compared = specs[-1]  # of the token decoder's two ends, the logits
        progress(f"{weights}: reference")
        reference = TorchStage(model, compared)
        inputs = {case: stage_inputs(compared, model.config, *case) for case in _cases(model)}
        expected = {case: reference(*arrays) for case, arrays in inputs.items()}
        for name in precisions:
            progress(f"{weights}: {name}")
            stage = _StageProof(folder, manifest, model, compared, name, inputs, expected)
            lines += stage.float32() if name == "fp32" else stage.half()
            if len(specs) > 1:
                lines += stage.tokens(specs[0])
    graphs = {
        f"{entry.precision}/{entry.stage}": entry.graph.sha256
        for entry in manifest.graphs
        if entry.precision in precisions
    }
    return Parity(lines, graphs)


def _cases(model: LDLM) -> list[Case]:
    return [(b, min(t, model.config.n_positions)) for b, t in CASES]


class _StageProof:
    """One stage in one precision."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        model: LDLM,
        spec: StageSpec,
        precision: str,
        inputs: dict[Case, tuple[Array, ...]],
        expected: dict[Case, Array],
    ) -> None:
        self.folder, self.manifest, self.model = folder, manifest, model
        self.spec, self.precision = spec, precision
        self.inputs, self.expected = inputs, expected
        file = OrtStage.from_artifacts(folder, manifest, spec.name, precision)
        self.file = {case: file(*arrays) for case, arrays in inputs.items()}

    def float32(self) -> Iterator[Line]:
        for case, got in self.file.items():
            yield self._line("graph", case, compare(got, self.expected[case]), FORMULA_L2)

    def half(self) -> Iterator[Line]:
        rules = policies.policy(self.precision)
        module = policies.apply(self.spec.build(self.model), self.spec.weights, rules)
        yield from self._formula(policies.without_rounding(module))
        linear = next(rule for rule in rules if rule.what == "linear")
        autocast = HalfProducts(getattr(torch, linear.dtype))
        policy_stage = TorchStage(self.model, self.spec, module)
        plain_stage = TorchStage(self.model, self.spec)
        for case, arrays in self.inputs.items():
            with autocast:
                theirs = compare(plain_stage(*arrays), self.expected[case])
            with HalfProducts():
                ours = compare(policy_stage(*arrays), self.expected[case])
            limit = AUTOCAST_RATIO * theirs.relative_l2
            yield self._line("precision", case, ours, limit)
            yield self._line("file", case, compare(self.file[case], self.expected[case]), limit)

    def tokens(self, spec: StageSpec) -> Iterator[Line]:
        """The ids file against the logits file, and against the reference's choice."""
        ids_stage = OrtStage.from_artifacts(self.folder, self.manifest, spec.name, self.precision)
        for case, arrays in self.inputs.items():
            ids = ids_stage(*arrays)
            logits, reference = self.file[case], self.expected[case]
            differs = ids != logits.argmax(axis=-1)
            if self.precision == "fp32":
                noise = NEAR_TIE * float(np.abs(logits - reference).max())
                chosen = np.take_along_axis(reference, ids[..., None], axis=-1)[..., 0]
                differs |= reference.max(axis=-1) - chosen > noise
            yield Line(spec.name, self.precision, "tokens", *case, float(differs.mean()), 0.0)

    def _formula(self, module: torch.nn.Module) -> Iterator[Line]:
        entry = self.manifest.graph(self.precision, self.spec.name)
        graph = ir.load(entry.graph.verified(self.folder))
        widen(graph)
        reference = TorchStage(self.model, self.spec, module)
        with files.staging_folder(self.folder) as staging:
            path = staging / "widened.onnx"
            ir.save(graph, path, external_data="widened.onnx.data")
            wide = OrtStage(path, self.spec, self.model.config)
            for case, arrays in self.inputs.items():
                distance = compare(wide(*arrays), reference(*arrays))
                yield self._line("formula", case, distance, FORMULA_L2)

    def _line(self, question: str, case: Case, distance: Comparison, limit: float) -> Line:
        return Line(
            self.spec.name, self.precision, question, *case, distance.relative_l2, limit, distance
        )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
