"""Stages in PyTorch: the reference, and the evaluator, which rounds every tensor as a device does.

The evaluator is slow, and runs on any machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from engines.evaluator.graph import Evaluator
from engines.runtime.stage import Array, GraphStage, RuntimeStage
from export.stages import StageSpec
from ldlm.config import LDLMConfig
from ldlm.model import LDLM


class TorchStage(RuntimeStage):
    """One stage on NumPy arrays; its first output alone.

    Args:
        model: the reference model.
        spec: which stage.
        module: the module to run in place of the spec's own, for example one with a precision
            policy applied.
    """

    def __init__(self, model: LDLM, spec: StageSpec, module: nn.Module | None = None) -> None:
        super().__init__(spec, model.config)
        self.module = (spec.torch(model) if module is None else module).eval()

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        inputs = (torch.from_numpy(feeds[tensor.name]) for tensor in self.spec.inputs)
        (name,) = outputs
        with torch.inference_mode():
            return {name: self.module(*inputs).numpy()}


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
