"""Dynamic int8 products: weights quantised once per output channel, activations at every run.

    x ~ s_x (q_x - z_x), q_x uint8, from the smallest and largest element of the whole tensor
    W ~ s_w q_w,         q_w int8, one s_w per output channel, symmetric
    x W = s_x s_w (q_x - z_x) q_w

Weights have 7 bits (-63..63): without VNNI a CPU adds two products of uint8 and int8 in 16 bits,
and 255 * 127 * 2 does not fit (it would saturate silently).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from export.passes._constants import Float32s, constant, float32

LEVELS = 63


def quantise_linear(model: ir.Model, keep: Callable[[ir.Node], bool] = lambda _: False) -> int:
    """Replace every MatMul(x, W) with a constant float32 W [n, m] by its int8 form.

    Args:
        model: a float32 graph, changed in place.
        keep: says of a product that it stays float32.

    Returns:
        How many products were replaced.
    """
    graph = model.graph
    fired = 0
    seen: dict[ir.Value, list[ir.Value]] = {}
    for node in list(graph):
        weight = float32(node.inputs[1]) if node.op_type == "MatMul" else None
        x = node.inputs[0]
        if weight is None or weight.ndim != 2 or x is None or keep(node):
            continue
        tape = Tape()
        if x not in seen:  # one quantisation for q, k and v alike
            seen[x] = list(tape.op_multi_out("DynamicQuantizeLinear", [x], num_outputs=3))
        q_x, s_x, z_x = seen[x]
        codes, scales = quantised(weight)
        name = str(node.inputs[1].name) if node.inputs[1] is not None else "weight"
        q_w = _int8(graph, codes, f"{name}.int8")
        s_w = constant(graph, scales, f"{name}.scales")
        product = tape.op("Cast", [tape.op("MatMulInteger", [q_x, q_w, z_x])], {"to": 1})
        result = tape.op("Mul", [product, tape.op("Mul", [s_x, s_w])])
        result.dtype, result.shape = ir.DataType.FLOAT, node.outputs[0].shape
        graph.insert_before(node, tape.nodes)
        node.outputs[0].replace_all_uses_with(result)
        graph.remove(node, safe=True)
        fired += 1
    RemoveUnusedNodesPass()(model)
    return fired


def quantised(weight: Float32s) -> tuple[NDArray[np.int8], Float32s]:
    """Codes [n, m] and scales [m] of a weight [n, m]; a channel of zeros has scale 1."""
    largest = np.abs(weight).max(axis=0)
    scales = np.where(largest > 0, largest / LEVELS, 1).astype(np.float32)
    return np.rint(weight / scales).astype(np.int8), scales


def _int8(graph: ir.Graph, codes: NDArray[np.int8], name: str) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(codes.shape), type=ir.TensorType(ir.DataType.INT8))
    value.const_value = ir.tensor(codes, name=name)
    graph.register_initializer(value)
    return value
