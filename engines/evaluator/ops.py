"""ONNX operators in PyTorch, rounding as a device with half tensors does.

What one operator computes inside is rounded once, when its result is stored in the dtype that
the graph declares; matrix products multiply half inputs exactly and add in float32, as tensor
cores do. A product and its bias are one operator, written as Gemm or as MatMul and Add: TensorRT
makes the same layers of both, and one kernel of these. Norms are the exception: they are computed
step by step in their own dtype, squares and sums included, because a half norm that overflows on a
device must overflow here. PyTorch's own half norms, softmax and products would not show it.

What rounds nothing is handed to ONNX's reference implementation: operators that only move data,
numbers that are integers, RotaryEmbedding, which only float32 graphs have, and forms of Attention
and Cast that no half graph of ours has (rows, masks, caches, 8-bit and smaller types).
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from engines.evaluator.half import fused_attention
from ldlm.errors import ArtifactError

Array = NDArray[Any]
# Tensors; NumPy arrays only for dtypes that PyTorch does not have (8 bits and fewer, strings).
Value = Any
# Of a node, its inputs, and its attributes by name: one output, or several as a tuple.
Operator = Callable[..., Value]

HALF = (torch.float16, torch.bfloat16)

_NAMES = [kind + bits for kind in ("float", "int", "uint") for bits in ("16", "32", "64")]
TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.from_numpy(np.dtype(name)): getattr(torch, name)  # NumPy's names are PyTorch's
    for name in ("bool", "int8", "uint8", *_NAMES)
} | {ir.DataType.BFLOAT16: torch.bfloat16}


def to_value(array: Array) -> Value:
    """A NumPy array as a tensor; as it is, where PyTorch has no such dtype."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(array))
    except TypeError:
        return array


def to_array(value: Value) -> Array:
    """The NumPy array of a value; bfloat16 as ml_dtypes has it."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.uint16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return value.numpy()


def wide(x: Tensor) -> Tensor:
    """Half as float32, in which one operator computes; anything else as it is."""
    return x.float() if x.dtype in HALF else x


def rounded(function: Callable[..., Tensor]) -> Operator:
    """An operator whose one result has the dtype of its first input, rounded once."""

    def operator(node: ir.Node, *inputs: Value, **attributes: Any) -> Value:
        if not inputs[0].is_floating_point():
            return reference(node, *inputs)
        values = (None if value is None else wide(value) for value in inputs)
        return function(*values, **attributes).to(inputs[0].dtype)

    return operator


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return y if c is None else y + beta * c


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


def product(node: ir.Node, a: Tensor, b: Tensor) -> Value:
    """A product that `add_bias` reads before it is rounded."""
    return torch.matmul(wide(a), wide(b))


def add_bias(node: ir.Node, a: Tensor, b: Tensor) -> Value:
    """The sum of a `product` and its bias, in the dtype of the bias."""
    return (wide(a) + wide(b)).to(a.dtype if a.dtype in HALF else b.dtype)


def exact(function: Callable[..., Value]) -> Operator:
    """An operator that rounds by itself, or has nothing to round."""
    return lambda node, *inputs, **attributes: function(*inputs, **attributes)


def _layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    **stash: int,
) -> Value:
    """Every step in the dtype of x, as onnx.reference does it; the sums are rounded too."""
    dims = tuple(range(axis % x.ndim, x.ndim))
    count = math.prod(x.shape[axis:])

    def mean(values: Tensor) -> Tensor:
        total = wide(values).sum(dims, keepdim=True).to(x.dtype)
        return (wide(total) / count).to(x.dtype)

    average = mean(x)
    centred = x - average
    deviation = torch.sqrt(mean(centred * centred) + torch.tensor(epsilon, dtype=x.dtype))
    y = (centred / deviation) * scale
    return y if bias is None else y + bias, average, torch.reciprocal(deviation)


def _reduce_l2(
    x: Tensor, axes: Tensor | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Value:
    """The root of the rounded sum of rounded squares."""
    dims = [] if axes is None else axes.tolist()
    if not dims and noop_with_empty_axes:
        return x
    total = wide(x * x).sum(dims or None, keepdim=bool(keepdims))
    return torch.sqrt(wide(total.to(x.dtype))).to(x.dtype)


def _softmax(x: Tensor, axis: int = -1) -> Value:
    """exp(x - max) / sum, each stored in the dtype of x."""
    powers = torch.exp(wide(x - x.amax(axis, keepdim=True))).to(x.dtype)
    total = wide(powers).sum(axis, keepdim=True).to(x.dtype)
    return (wide(powers) / wide(total)).to(x.dtype)


def _cast(node: ir.Node, x: Value, *, to: int, **rounding: Any) -> Value:
    dtype = TORCH_DTYPES.get(ir.DataType(to))
    return reference(node, x) if dtype is None or not isinstance(x, Tensor) else x.to(dtype)


# Attributes of Attention that change nothing, as exporters write them.
PLAIN = {"is_causal": 0, "qk_matmul_output_mode": 0, "softcap": 0.0}


def _attention(
    node: ir.Node, *inputs: Value, scale: float | None = None, **attributes: Any
) -> Value:
    """softmax(Q K^T scale) V as a fused kernel computes it, in its plain form."""
    plain = len(inputs) == 3 and len(node.outputs) == 1 and attributes.items() <= PLAIN.items()
    if not plain or inputs[0].ndim != 4 or inputs[0].shape[1] != inputs[1].shape[1]:
        return reference(node, *inputs)
    q, k, v = inputs
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return fused_attention(wide(q), wide(k), wide(v), factor, q.dtype)


def reference(node: ir.Node, *inputs: Value, **_: Any) -> Value:
    """The operator as ONNX's reference implementation computes it."""
    if node not in _REFERENCES:
        _REFERENCES[node] = _reference_of(node)
    feeds = {f"in{i}": to_array(v) for i, v in enumerate(inputs) if v is not None}
    results = iter(_REFERENCES[node].run(None, feeds, {}))
    return tuple(to_value(next(results)) if value.name else None for value in node.outputs)


_REFERENCES: WeakKeyDictionary[ir.Node, ReferenceEvaluator] = WeakKeyDictionary()


def _reference_of(node: ir.Node) -> ReferenceEvaluator:
    inputs = ["" if value is None else f"in{i}" for i, value in enumerate(node.inputs)]
    outputs = [f"out{i}" if value.name else "" for i, value in enumerate(node.outputs)]
    proto = onnx.helper.make_node(node.op_type, inputs, outputs)
    proto.attribute.extend(ir.to_proto(a) for a in node.attributes.values())
    version = node.version or (node.graph.opset_imports.get("") if node.graph else None) or 23
    opsets = [onnx.helper.make_opsetid("", version)]
    takes, gives = [name for name in inputs if name], [name for name in outputs if name]
    function = onnx.helper.make_function("", "one", takes, gives, [proto], opsets)
    return ReferenceEvaluator(function)


OPERATORS: dict[str, Operator] = {
    "Add": rounded(torch.add),
    "ArgMax": reference,
    "Attention": _attention,
    "Cast": _cast,
    "Clip": rounded(_clip),
    "Concat": exact(lambda *inputs, axis=0: torch.cat(inputs, axis)),
    "Constant": exact(lambda value: to_value(value.numpy())),
    "Cos": rounded(torch.cos),
    "Div": rounded(torch.div),
    "Expand": reference,
    "Gather": reference,
    "Gelu": rounded(F.gelu),
    "Gemm": rounded(_gemm),
    "LayerNormalization": exact(_layer_norm),
    "MatMul": rounded(torch.matmul),
    "Max": rounded(lambda *values: functools.reduce(torch.maximum, values)),
    "Mul": rounded(torch.mul),
    "Neg": rounded(torch.neg),
    "ReduceL2": exact(_reduce_l2),
    "Reshape": reference,
    "RotaryEmbedding": reference,
    "Shape": reference,
    "Sigmoid": rounded(torch.sigmoid),
    "Sin": rounded(torch.sin),
    "Slice": reference,
    "Softmax": exact(_softmax),
    "Split": reference,
    "Squeeze": reference,
    "Tanh": rounded(torch.tanh),
    "Transpose": exact(lambda x, perm=None: x.permute(perm or [*range(x.ndim)][::-1])),
    "Unsqueeze": reference,
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
            "the evaluator has no such operator",
            tensor=node.name,
            expected=", ".join(OPERATORS),
            got=name,
        )
    return found
