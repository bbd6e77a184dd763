"""The residual scale into the projection before it: s (x W + b) = x (s W) + s b, s the factor."""

from __future__ import annotations

import onnx_ir as ir

from export.passes._constants import Float32s, constant, drop, float32, maker, split_constant


def fold_scales(model: ir.Model) -> int:
    """Fold Mul(x W [+ b], s) with one number s into W and b, all in float32.

    Does not fire where anything else reads the unscaled product or sum.

    Returns:
        How many scales were folded.
    """
    graph = model.graph
    fired = 0
    for node in list(graph):
        found = split_constant(node) if node.op_type == "Mul" else None
        if found is None or found[0].size != 1 or found[0].ndim > 1:
            continue
        scale, y = found
        total = maker(y, "Add")
        bias = None if total is None else split_constant(total)
        product = maker(y if total is None or bias is None else bias[1], "MatMul")
        weight = None if product is None else float32(product.inputs[1])
        if product is None or weight is None or (total is not None and bias is None):
            continue
        _scale(graph, product, 1, weight * scale.reshape(()))
        if total is not None and bias is not None:
            place = 0 if total.inputs[1] is bias[1] else 1
            _scale(graph, total, place, bias[0] * scale.reshape(()))
        drop(graph, node, y)
        fired += 1
    return fired


def _scale(graph: ir.Graph, node: ir.Node, place: int, array: Float32s) -> None:
    old = node.inputs[place]
    name = "scaled" if old is None else f"{old.name}.scaled"
    node.replace_input_with(place, constant(graph, array, name))
