"""ONNX operators in PyTorch, rounding as a device with half tensors does.

What one operator computes inside is rounded once, when its result is stored in the dtype that
the graph declares; matrix products multiply half inputs exactly and add in float32, as tensor
cores do. A product and its bias are one operator, written as Gemm or as MatMul and Add: TensorRT
makes the same layers of both, and one kernel of these. Norms are the exception: they are computed
step by step in their own dtype, squares and sums included, because a half norm that overflows on a
device must overflow here. PyTorch's own half norms, softmax and products would not show it.

RotaryEmbedding, which only float32 graphs have, and forms of Attention and Cast that no half graph
of ours has (rows, masks, caches, 8-bit and smaller types) are handed to ONNX's reference
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from engines.evaluator.half import fused_attention
from ldlm.errors import ArtifactError

# Tensors; NumPy arrays only for dtypes that PyTorch does not have (8 bits and fewer, strings).
Value = Any
Operator = Callable[[ir.Node, Sequence[Value]], tuple[Value, ...]]

HALF = (torch.float16, torch.bfloat16)

TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
}


def to_value(array: np.ndarray[Any, Any]) -> Value:
    """A NumPy array as a tensor; as it is, where PyTorch has no such dtype."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(array))
    except TypeError:
        return array


def to_array(value: Value) -> np.ndarray[Any, Any]:
    """The NumPy array of a value; bfloat16 as ml_dtypes has it."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return value.numpy()


def wide(x: Tensor) -> Tensor:
    """Half as float32, in which one operator computes; anything else as it is."""
    return x.float() if x.dtype in HALF else x


def _numbers(x: Tensor) -> Tensor:
    """Integers as int64: PyTorch computes with few unsigned types."""
    return wide(x) if x.is_floating_point() else x.to(torch.int64)


def elementwise(function: Callable[..., Tensor]) -> Operator:
    """An operator whose one result has the dtype of its first input, rounded once."""

    def operator(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
        return (function(*map(_numbers, inputs)).to(inputs[0].dtype),)

    return operator


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute's value, or the default of the operator's definition."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Integers divide towards zero."""
    quotient: Tensor = torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")
    return quotient


def _gelu(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x = inputs[0]
    return (F.gelu(wide(x), approximate=attribute(node, "approximate", "none")).to(x.dtype),)


def _clip(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, low, high = (*inputs, None, None)[:3]
    y = _numbers(x)
    y = y if low is None else torch.maximum(y, _numbers(low))
    return ((y if high is None else torch.minimum(y, _numbers(high))).to(x.dtype),)


def _max(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    y = _numbers(inputs[0])
    for other in inputs[1:]:
        y = torch.maximum(y, _numbers(other))
    return (y.to(inputs[0].dtype),)


def _matmul(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    a, b = inputs
    return (torch.matmul(_numbers(a), _numbers(b)).to(a.dtype),)


def biased(node: ir.Node) -> ir.Node | None:
    """The addition of a constant vector, where nothing else reads this product."""
    product = node.outputs[0]
    uses = list(product.uses())
    if node.op_type != "MatMul" or product.is_graph_output() or len(uses) != 1:
        return None
    after = uses[0].node
    other = next((value for value in after.inputs if value is not product), None)
    constant = None if other is None else other.const_value
    vector = constant is not None and len(constant.shape) == 1
    return after if after.op_type == "Add" and vector else None


def product(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """A product that `add_bias` reads before it is rounded."""
    a, b = inputs
    return (torch.matmul(_numbers(a), _numbers(b)),)


def add_bias(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The sum of a `product` and its bias, in the dtype of the bias."""
    a, b = inputs
    dtype = a.dtype if a.dtype in HALF else b.dtype
    return ((wide(a) + wide(b)).to(dtype),)


def _gemm(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    a, b, c = (*inputs, None)[:3]
    left = a.T if attribute(node, "transA", 0) else a
    right = b.T if attribute(node, "transB", 0) else b
    y = attribute(node, "alpha", 1.0) * (_numbers(left) @ _numbers(right))
    if c is not None:
        y = y + attribute(node, "beta", 1.0) * _numbers(c)
    return (y.to(a.dtype),)


def _axes(node: ir.Node, inputs: Sequence[Value], ndim: int) -> list[int] | None:
    given = inputs[1].tolist() if len(inputs) > 1 and inputs[1] is not None else None
    return None if given is None else [axis % ndim for axis in given]


def _layer_norm(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """Every step in the dtype of x, as onnx.reference does it; the sums are rounded too."""
    x, scale, bias = (*inputs, None)[:3]
    dtype, axis = x.dtype, attribute(node, "axis", -1) % x.ndim
    dims = tuple(range(axis, x.ndim))
    count: int = math.prod(x.shape[axis:])

    def mean(values: Tensor) -> Tensor:
        total = wide(values).sum(dims, keepdim=True).to(dtype)
        return (wide(total) / count).to(dtype)

    average = mean(x)
    centred = x - average
    variance = mean(centred * centred)
    deviation = torch.sqrt(variance + torch.tensor(attribute(node, "epsilon", 1e-5), dtype=dtype))
    y = (centred / deviation) * scale
    y = y if bias is None else y + bias
    return y, average, torch.reciprocal(deviation)


def _reduce_l2(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The root of the rounded sum of rounded squares."""
    x = inputs[0]
    dims = _axes(node, inputs, x.ndim)
    if not dims:
        if attribute(node, "noop_with_empty_axes", 0):
            return (x,)
        dims = list(range(x.ndim))
    squares = x * x
    total = wide(squares).sum(dims, keepdim=bool(attribute(node, "keepdims", 1)))
    return (torch.sqrt(wide(total.to(x.dtype))).to(x.dtype),)


def _softmax(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """exp(x - max) / sum, each stored in the dtype of x."""
    x, axis = inputs[0], attribute(node, "axis", -1)
    shifted = x - x.amax(axis, keepdim=True)
    powers = torch.exp(wide(shifted)).to(x.dtype)
    total = wide(powers).sum(axis, keepdim=True).to(x.dtype)
    return ((wide(powers) / wide(total)).to(x.dtype),)


def _argmax(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, axis = inputs[0], attribute(node, "axis", 0)
    if attribute(node, "select_last_index", 0):
        index = x.shape[axis] - 1 - torch.argmax(x.flip(axis), axis)
    else:
        index = torch.argmax(x, axis)
    return (index.unsqueeze(axis) if attribute(node, "keepdims", 1) else index,)


def _reshape(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, shape = inputs[0], inputs[1].tolist()
    if not attribute(node, "allowzero", 0):
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return (torch.reshape(x, shape),)


def _transpose(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x = inputs[0]
    return (x.permute(attribute(node, "perm", tuple(reversed(range(x.ndim))))),)


def _unsqueeze(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x = inputs[0]
    axes = inputs[1].tolist()
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return (x,)


def _squeeze(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x = inputs[0]
    axes = _axes(node, inputs, x.ndim)
    return (x.squeeze() if axes is None else x.squeeze(tuple(axes)),)


def _split(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, axis = inputs[0], attribute(node, "axis", 0)
    if len(inputs) > 1 and inputs[1] is not None:
        return tuple(torch.split(x, inputs[1].tolist(), axis))
    parts, size = len(node.outputs), x.shape[axis]
    each = -(-size // parts)
    sizes = [max(0, min(each, size - i * each)) for i in range(parts)]
    return tuple(torch.split(x, sizes, axis))


def _slice(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, starts, ends, axes, steps = (*inputs, None, None)[:5]
    first = starts.tolist()
    which = range(len(first)) if axes is None else axes.tolist()
    strides = [1] * len(first) if steps is None else steps.tolist()
    for axis, start, end, step in zip(which, first, ends.tolist(), strides, strict=True):
        size = x.shape[axis]
        picked = range(*slice(start, end if step > 0 or end >= -size else None, step).indices(size))
        x = x.index_select(axis, torch.tensor(list(picked), dtype=torch.int64))
    return (x,)


def _gather(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, indices = inputs
    axis = attribute(node, "axis", 0) % x.ndim
    chosen = torch.where(indices < 0, indices + x.shape[axis], indices).to(torch.int64)
    picked = x.index_select(axis, chosen.reshape(-1))
    return (picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]),)


def _shape(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    shape = inputs[0].shape[attribute(node, "start", 0) : attribute(node, "end", None)]
    return (torch.tensor(list(shape), dtype=torch.int64),)


def _expand(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    x, shape = inputs[0], inputs[1].tolist()
    return (x.expand(np.broadcast_shapes(tuple(x.shape), tuple(shape))),)


def _concat(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    return (torch.cat(list(inputs), attribute(node, "axis", 0)),)


def _constant(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    return (to_value(node.attributes["value"].as_tensor().numpy()),)


def _cast(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    dtype = TORCH_DTYPES.get(ir.DataType(node.attributes["to"].as_int()))
    if dtype is None or not isinstance(inputs[0], Tensor):
        return reference(node, inputs)
    return (inputs[0].to(dtype),)


# Attributes of Attention that change nothing, as exporters write them.
PLAIN = {"is_causal": 0, "qk_matmul_output_mode": 0, "softcap": 0.0}


def _attention(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """softmax(Q K^T scale) V as a fused kernel computes it, in its plain form."""
    given = {name: a.value for name, a in node.attributes.items() if name != "scale"}
    plain = len(inputs) == 3 and len(node.outputs) == 1 and given.items() <= PLAIN.items()
    if not plain or inputs[0].ndim != 4 or inputs[0].shape[1] != inputs[1].shape[1]:
        return reference(node, inputs)
    q, k, v = inputs
    scale = attribute(node, "scale", q.shape[-1] ** -0.5)
    return (fused_attention(wide(q), wide(k), wide(v), scale, q.dtype),)


def reference(node: ir.Node, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The operator as ONNX's reference implementation computes it."""
    proto = onnx.helper.make_node(
        node.op_type,
        ["" if value is None else f"in{i}" for i, value in enumerate(inputs)],
        ["" if not value.name else f"out{i}" for i, value in enumerate(node.outputs)],
    )
    proto.attribute.extend(ir.to_proto(a) for a in node.attributes.values())
    version = node.version or (node.graph.opset_imports.get("") if node.graph else None) or 23
    graph = onnx.helper.make_graph(
        [proto],
        "one",
        [onnx.ValueInfoProto(name=name) for name in proto.input if name],
        [onnx.ValueInfoProto(name=name) for name in proto.output if name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    feeds = {f"in{i}": to_array(v) for i, v in enumerate(inputs) if v is not None}
    results = iter(ReferenceEvaluator(model).run(None, feeds))
    return tuple(to_value(next(results)) if value.name else None for value in node.outputs)


OPERATORS: dict[str, Operator] = {
    "Add": elementwise(torch.add),
    "ArgMax": _argmax,
    "Attention": _attention,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "Cos": elementwise(torch.cos),
    "Div": elementwise(_divide),
    "Expand": _expand,
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "MatMul": _matmul,
    "Max": _max,
    "Mul": elementwise(torch.mul),
    "Neg": elementwise(torch.neg),
    "ReduceL2": _reduce_l2,
    "Reshape": _reshape,
    "RotaryEmbedding": reference,
    "Shape": _shape,
    "Sigmoid": elementwise(torch.sigmoid),
    "Sin": elementwise(torch.sin),
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tanh": elementwise(torch.tanh),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def operator(node: ir.Node) -> Operator:
    """The implementation of a node's operator.

    Raises:
        ArtifactError: there is none; it is named, never guessed.
    """
    found = OPERATORS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if found is None:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise ArtifactError(
            "the evaluator has no such operator", tensor=node.name, got=name,
            expected=", ".join(OPERATORS),
        )  # fmt: skip
    return found
