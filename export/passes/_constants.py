"""What the folding passes share: constants of a graph, and new ones in their place."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Float32s = NDArray[np.float32]


def float32(value: ir.Value | None) -> Float32s | None:
    """The content of a float32 constant; None for anything else.

    Only float32 is folded: a half weight that takes up a factor would be rounded a second time.
    """
    constant = None if value is None else value.const_value
    if constant is None or constant.dtype != ir.DataType.FLOAT:
        return None
    array: Float32s = constant.numpy()
    return array


def constant(graph: ir.Graph, array: Float32s, name: str) -> ir.Value:
    """A new float32 constant of the graph; the name gets a number if it is taken."""
    taken, number, wanted = graph.initializers, 1, name
    while name in taken:
        number += 1
        name = f"{wanted}.{number}"
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.tensor(np.ascontiguousarray(array, np.float32), name=name)
    graph.register_initializer(value)
    return value


def maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of this type and nothing else reads the value."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != op_type or value is None or len(value.uses()) != 1:
        return None
    return None if value.is_graph_output() else node


def split_constant(node: ir.Node) -> tuple[Float32s, ir.Value] | None:
    """The constant and the other operand of a product or sum, in whichever order they stand."""
    for own, other in ((0, 1), (1, 0)):
        array, value = float32(node.inputs[own]), node.inputs[other]
        if array is not None and value is not None and float32(value) is None:
            return array, value
    return None


def replace_constant(
    graph: ir.Graph, node: ir.Node, other: ir.Value, array: Float32s, name: str
) -> None:
    """Give a product or sum another constant; `other` is its other operand."""
    place = 0 if node.inputs[1] is other else 1
    node.replace_input_with(place, constant(graph, array, name))


def drop(graph: ir.Graph, node: ir.Node, instead: ir.Value) -> None:
    """Remove a node; what reads its output reads `instead`."""
    old = node.outputs[0]
    if instead.shape is None:
        instead.shape = old.shape
    old.replace_all_uses_with(instead, replace_graph_outputs=True)
    graph.remove(node, safe=True)
