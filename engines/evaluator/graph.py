"""Executes an ONNX graph with every tensor rounded to the dtype that the graph declares.

ONNX Runtime's CPU provider computes fp16 in float32 and has no bf16; PyTorch's CPU kernels compute
half norms in float32. Neither shows what a device would. This evaluator does, on any machine.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from engines.evaluator import ops
from engines.evaluator.ops import Array
from ldlm.errors import ArtifactError


class Evaluator:
    """A graph, ready to run on NumPy arrays.

    Args:
        graph: the graph; its external data is read once, here.

    Raises:
        ArtifactError: an operator of the graph is not implemented.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        operators = {node: ops.operator(node) for node in graph}
        for node in graph:
            if (after := ops.biased(node)) is not None:
                operators[node], operators[after] = ops.product, ops.add_bias
        self._nodes = list(operators.items())
        self._constants = {
            value: ops.to_value(value.const_value.numpy())
            for value in graph.initializers.values()
            if value.const_value is not None
        }
        self._last_use = {
            value: index
            for index, (node, _) in enumerate(self._nodes)
            for value in node.inputs
            if value is not None
        }

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Every output of the graph by name.

        Raises:
            ArtifactError: an operator's result is not of the dtype that the graph declares.
        """
        values: dict[ir.Value, Any] = dict(self._constants)
        values.update({value: ops.to_value(feeds[str(value.name)]) for value in self.graph.inputs})
        kept = set(self.graph.outputs)
        with torch.inference_mode(), np.errstate(all="ignore"):
            for index, (node, operator) in enumerate(self._nodes):
                inputs = [None if value is None else values[value] for value in node.inputs]
                attributes = {name: found.value for name, found in node.attributes.items()}
                results = operator(node, *inputs, **attributes)
                several = results if isinstance(results, tuple) else (results,)
                for value, result in zip(node.outputs, several, strict=False):
                    if operator is not ops.product:
                        _check_dtype(node, value, result)
                    values[value] = result
                for used in node.inputs:
                    if used is not None and self._last_use[used] == index and used not in kept:
                        values.pop(used, None)
        return {str(value.name): ops.to_array(values[value]) for value in self.graph.outputs}


def _check_dtype(node: ir.Node, value: ir.Value, result: Any) -> None:
    """What rounds is the declared dtype; an operator must not have ignored it."""
    declared = ops.TORCH_DTYPES.get(value.dtype) if value.dtype is not None else None
    if declared is not None and isinstance(result, torch.Tensor) and result.dtype != declared:
        raise ArtifactError(
            "an operator's result is not of the dtype that the graph declares",
            tensor=value.name,
            expected=str(value.dtype),
            got=f"{result.dtype} from {node.op_type}",
        )
