"""A stage with every tensor rounded as a device does: slow, and on any machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from engines.evaluator.graph import Evaluator
from engines.runtime.stage import Array, GraphStage
from export.stages import StageSpec
from ldlm.config import LDLMConfig


class EvaluatorStage(GraphStage):
    """One stage on the evaluator; see `engines.evaluator.graph`.

    Raises:
        ArtifactError: the evaluator lacks an operator of the graph.
    """

    def __init__(self, path: Path, spec: StageSpec, config: LDLMConfig) -> None:
        super().__init__(path, spec, config)
        self._evaluator = Evaluator(ir.load(path).graph)

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        found = self._evaluator.run(feeds)
        return {name: found[name] for name in outputs}
