"""A stage with every tensor rounded as a device does: slow, and on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from engines.evaluator.graph import Evaluator
from engines.runtime.stage import Array, RuntimeStage
from export.stages import StageSpec, graph_ranges
from ldlm.config import LDLMConfig


class EvaluatorStage(RuntimeStage):
    """One stage on the evaluator; see `engines.evaluator.graph`.

    Args:
        path: the .onnx file.
        spec, config: what its tensors look like.

    Raises:
        ArtifactError: the evaluator lacks an operator of the graph.
    """

    def __init__(self, path: Path, spec: StageSpec, config: LDLMConfig) -> None:
        super().__init__(spec, config, graph_ranges(config), "cpu")
        self._evaluator = Evaluator(ir.load(path).graph)

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        found = self._evaluator.run(feeds)
        return {name: found[name] for name in outputs}
