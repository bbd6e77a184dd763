"""A stage in PyTorch: the reference of the proof and a peer of the benchmarks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engines.runtime.stage import Array, RuntimeStage
from export.stages import StageSpec
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
