"""What passes and checks share: constants, casts, widths, dtypes."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from export.precision import Precision
from ldlm.errors import GraphCheckError

Float32s = NDArray[np.float32]


def float32(value: ir.Value | None) -> Float32s | None:
    """The content of a float32 constant; None for anything else."""
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


def cast(tape: Tape, value: ir.Value | None, dtype: ir.DataType | None) -> ir.Value:
    """The value in a dtype: itself, or a Cast of it.

    Raises:
        GraphCheckError: there is no value, or no dtype.
    """
    if value is None or dtype is None:
        raise GraphCheckError("a node lacks an input or a dtype")
    if value.dtype == dtype:
        return value
    made = tape.op("Cast", [value], {"to": int(dtype)})
    made.dtype, made.shape = dtype, value.shape
    return made


def width(value: ir.Value | None) -> int:
    """The size of a value's last axis.

    Raises:
        GraphCheckError: it is not known.
    """
    size = None if value is None or value.shape is None else value.shape[-1]
    if not isinstance(size, int):
        raise GraphCheckError("a width is not known", tensor=value.name if value else None)
    return size


def rule_dtype(precision: Precision, component: str, what: str) -> ir.DataType:
    """The dtype that a precision gives to a kind of computation in a component."""
    return {
        "float32": ir.DataType.FLOAT,
        "float16": ir.DataType.FLOAT16,
        "bfloat16": ir.DataType.BFLOAT16,
    }[precision.dtype(component, what)]


def number(node: ir.Node, name: str) -> float:
    """The value of an int or float attribute; 0 where the node has none of this name."""
    attribute = node.attributes.get(name)
    return float(attribute.value) if attribute is not None else 0.0
