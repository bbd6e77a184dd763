"""Attention from single operators, for a device whose fused kernel is wrong."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from export.passes.graph import cast, width
from ldlm.errors import GraphCheckError


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
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    for node in nodes:
        _require_plain(node)
        old = node.outputs[0]
        tape = Tape()
        heads = node.attributes.get_int("q_num_heads", 0)
        q32, k32, v32 = (
            _split(tape, cast(tape, value, ir.DataType.FLOAT), heads) for value in node.inputs[:3]
        )
        d_head = width(node.inputs[0]) // (heads or 1)
        factor = node.attributes.get_float("scale", 0.0) or d_head**-0.5
        scale = tape.op("Constant", [], {"value": ir.tensor(factor, dtype=ir.DataType.FLOAT)})
        keys = tape.op("Transpose", [k32], {"perm": [0, 1, 3, 2]})
        scores = tape.op("MatMul", [tape.op("Mul", [q32, scale]), keys])
        product = tape.op("MatMul", [tape.op("Softmax", [scores], {"axis": -1}), v32])
        product = _merge(tape, product, heads)
        for value in (value for made in tape.nodes for value in made.outputs):
            value.dtype = value.dtype or ir.DataType.FLOAT
        new = cast(tape, product, old.dtype)
        new.shape = old.shape
        model.graph.insert_before(node, tape.nodes)
        old.replace_all_uses_with(new)
        model.graph.remove(node, safe=True)
    return len(nodes)


def _split(tape: Tape, rows: ir.Value, heads: int) -> ir.Value:
    """[B, T, H * d_head] -> [B, H, T, d_head]; what is split already stays."""
    if not heads:
        return rows
    shape = _shape(tape, [0, 0, heads, -1])
    return tape.op("Transpose", [tape.op("Reshape", [rows, shape])], {"perm": [0, 2, 1, 3]})


def _merge(tape: Tape, value: ir.Value, heads: int) -> ir.Value:
    """[B, H, T, d_head] -> [B, T, H * d_head], where rows were split."""
    if not heads:
        return value
    rows = tape.op("Transpose", [value], {"perm": [0, 2, 1, 3]})
    return tape.op("Reshape", [rows, _shape(tape, [0, 0, -1])])


def _shape(tape: Tape, sizes: list[int]) -> ir.Value:
    shape = tape.op("Constant", [], {"value": ir.tensor(sizes)})
    shape.dtype = ir.DataType.INT64
    return shape


def _require_plain(node: ir.Node) -> None:
    extra = [str(value.name) for value in node.inputs[3:] if value is not None]
    extra += [name for name in ("is_causal", "softcap") if _number(node, name)]
    extra += [str(value.name) for value in node.outputs[1:] if value.uses()]
    if _number(node, "kv_num_heads") != _number(node, "q_num_heads"):
        extra.append("kv_num_heads")
    if extra:
        raise GraphCheckError(
            "an Attention node is not plain",
            tensor=node.name,
            got=", ".join(extra),
            remedy="build without --unfused-attention",
        )


def _number(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return float(attribute.value) if attribute is not None else 0.0
