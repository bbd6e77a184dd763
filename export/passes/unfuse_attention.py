"""Attention from single operators, for a device whose fused kernel is wrong."""

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRule

from export.passes.graph import number, width
from export.passes.rules import apply_rule
from ldlm.errors import GraphCheckError

FLOAT = ir.DataType.FLOAT


def unfuse_attention(model: ir.Model) -> int:
    """Replace every Attention node by softmax(Q K^T / sqrt(d_head)) V, in float32 throughout.

    Both layouts are known: heads [B, H, T, d_head], and rows [B, T, H * d_head].

    The inputs are cast to float32 and the result back, so that the form without a fused kernel is
    never less precise than the one with it.

    Returns:
        How many nodes were replaced.

    Raises:
        GraphCheckError: a node has a mask, a cache, a softcap or another layout than ours.
    """
    fired = apply_rule(model, RewriteRule(_pattern, _rewrite, _check), "Attention")
    for node in model.graph:
        if node.op_type == "Attention":
            raise GraphCheckError(
                "an Attention node is not plain",
                tensor=node.name,
                got=", ".join(_extra(node)),
                remedy="build without --unfused-attention",
            )
    return fired


def _pattern(op: Any, q: Any, k: Any, v: Any) -> Any:
    return op.Attention(q, k, v, _allow_other_inputs=True, _outputs=["output"])


def _check(context: Any, output: ir.Value, **_: ir.Value) -> MatchResult:
    """Success, or what the node has that we do not compute."""
    result, extra = MatchResult(), _extra(context.root)
    return result.fail(f"it has {', '.join(extra)}", context.root) if extra else result


def _rewrite(op: Any, q: ir.Value, k: ir.Value, v: ir.Value, output: Any) -> ir.Value:
    """softmax(Q K^T scale) V in single operators."""
    node = output.producer()
    heads, scale = int(number(node, "q_num_heads")), number(node, "scale")
    q32, k32, v32 = (_split(op, _cast(op, value, FLOAT), heads) for value in (q, k, v))
    factor = scale or (width(q) // (heads or 1)) ** -0.5
    scale = op.Constant(value=ir.tensor(factor, dtype=FLOAT))
    keys = op.Transpose(k32, perm=[0, 1, 3, 2])
    scores = op.MatMul(op.Mul(q32, scale), keys)
    product = _merge(op, op.MatMul(op.Softmax(scores, axis=-1), v32), heads)
    for value in (value for made in op.nodes for value in made.outputs):
        value.dtype = value.dtype or FLOAT
    return _cast(op, product, output.dtype)


def _cast(op: Any, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The value in a dtype: itself, or a Cast of it."""
    if value.dtype == dtype:
        return value
    made: ir.Value = op.Cast(value, to=int(dtype))
    made.dtype, made.shape = dtype, value.shape
    return made


def _split(op: Any, rows: ir.Value, heads: int) -> Any:
    """[B, T, H * d_head] -> [B, H, T, d_head]; what is split already stays."""
    if not heads:
        return rows
    return op.Transpose(op.Reshape(rows, _shape(op, [0, 0, heads, -1])), perm=[0, 2, 1, 3])


def _merge(op: Any, value: ir.Value, heads: int) -> Any:
    """[B, H, T, d_head] -> [B, T, H * d_head], where rows were split."""
    if not heads:
        return value
    return op.Reshape(op.Transpose(value, perm=[0, 2, 1, 3]), _shape(op, [0, 0, -1]))


def _shape(op: Any, sizes: list[int]) -> ir.Value:
    shape: ir.Value = op.Constant(value=ir.tensor(sizes))
    shape.dtype = ir.DataType.INT64
    return shape


def _extra(node: ir.Node) -> list[str]:
    """What an Attention has beside queries, keys and values of the same heads."""
    extra = [str(value.name) for value in node.inputs[3:] if value is not None]
    extra += [name for name in ("is_causal", "softcap") if number(node, name)]
    extra += [str(value.name) for value in node.outputs[1:] if value.uses()]
    if number(node, "kv_num_heads") != number(node, "q_num_heads"):
        extra.append("kv_num_heads")
    return extra
