"""A stage in PyTorch: the reference of the proof and a baseline of the benchmarks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from export.stages import StageSpec, checked_feeds, graph_ranges
from ldlm.model import LDLM


class TorchStage:
    """One stage as a callable on NumPy arrays.

    Args:
        model: the reference model.
        spec: which stage.
        module: the module to run in place of the spec's own, for example one with a precision
            policy applied.
    """

    def __init__(self, model: LDLM, spec: StageSpec, module: nn.Module | None = None) -> None:
        self.spec = spec
        self.config = model.config
        self.module = (spec.build(model) if module is None else module).eval()

    def __call__(self, *inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Run the stage.

        Raises:
            StageInputError: an input has the wrong dtype or shape, or a size outside the range.
        """
        checked_feeds(self.spec, self.config, graph_ranges(self.config), inputs)
        with torch.inference_mode():
            output: NDArray[np.float32] = self.module(*map(torch.from_numpy, inputs)).numpy()
        return output
