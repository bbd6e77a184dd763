"""Rotary attention on rows as the products give them: no head is moved to and fro.

As traced, queries, keys and values are split into heads and transposed, queries and keys are turned
by six operators each, and the result is transposed and merged again. ONNX has operators for the
rotation and the attention that read and write [B, T, H * d_head].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from export.passes.graph import float32, maker
from export.precision import Precision
from export.stages import StageSpec
from ldlm.errors import GraphCheckError

FLOAT = ir.DataType.FLOAT
Tables = tuple[ir.Value, ir.Value]


@dataclass(frozen=True)
class Pattern:
    """One attention with all that moves its heads.

    Attributes:
        q, k, v: rows [B, T, H * d_head].
        tables: cos and sin [T, d_head], of queries and keys alike.
        half: d_head / 2.
        merged: the result [B, T, H * d_head].
        heads: H.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    tables: Tables
    half: int
    merged: ir.Value
    heads: int


def fuse_rotary(model: ir.Model, spec: StageSpec) -> int:
    """Replace every rotary Attention of heads by one of rows; float32 alone.

    Does not fire where anything else reads a value in between, nor where a table does not turn
    both elements of a pair by one angle.

    Returns:
        How many attentions were replaced.
    """
    graph = model.graph
    found = [(node, _pattern(node)) for node in graph if node.op_type == "Attention"]
    fired = 0
    halves: dict[Tables, list[ir.Value]] = {}
    for node, pattern in found:
        if pattern is None:
            continue
        tape = Tape()
        if pattern.tables not in halves:  # the same for every block
            halves[pattern.tables] = _half_tables(tape, pattern)
        tables = halves[pattern.tables]
        turned = [
            tape.op("RotaryEmbedding", [rows, *tables], {"num_heads": pattern.heads})
            for rows in (pattern.q, pattern.k)
        ]
        heads = {"q_num_heads": pattern.heads, "kv_num_heads": pattern.heads}
        output = tape.op("Attention", [*turned, pattern.v], heads)
        for value in (*turned, output):
            value.dtype, value.shape = FLOAT, pattern.merged.shape
        graph.insert_before(node, tape.nodes)
        pattern.merged.replace_all_uses_with(output)
        fired += 1
    RemoveUnusedNodesPass()(model)
    return fired


def require_rows(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """Every float32 attention of a stage reads rows.

    Raises:
        GraphCheckError: naming the first that does not.
    """
    for node in graph:
        wide = node.op_type == "Attention" and node.outputs[0].dtype == ir.DataType.FLOAT
        if wide and not node.attributes.get_int("q_num_heads", 0):
            raise GraphCheckError(
                "a float32 attention does not read whole rows",
                stage=spec.name,
                tensor=node.name,
                remedy="export.passes.fuse_rotary does not know the pattern it was traced to",
            )


def _half_tables(tape: Tape, pattern: Pattern) -> list[ir.Value]:
    """cos and sin as RotaryEmbedding reads them: [B, T, d_head / 2], one angle for a pair."""
    size = tape.op("Constant", [], {"value": ir.tensor([pattern.half])})
    sizes = tape.op("Shape", [pattern.q], {"start": 0, "end": 2})
    shape = tape.op("Concat", [sizes, size], {"axis": 0})
    found = []
    for table in pattern.tables:
        first, _ = tape.op_multi_out("Split", [table], {"axis": 1, "num_outputs": 2}, num_outputs=2)
        found.append(tape.op("Expand", [first, shape]))
        first.dtype = found[-1].dtype = FLOAT
    return found


def _pattern(node: ir.Node) -> Pattern | None:
    scaled = any(node.attributes.get_float(name, 0.0) for name in ("scale", "softcap"))
    if len(node.inputs) != 3 or node.outputs[0].dtype != FLOAT or scaled:
        return None
    if node.attributes.get_int("is_causal", 0) or len(node.outputs) > 1:
        return None
    q, k = _turned(node.inputs[0]), _turned(node.inputs[1])
    v, merged = _rows(node.inputs[2]), _merged(node.outputs[0])
    if q is None or k is None or v is None or merged is None or q[1] != k[1]:
        return None
    shape = None if node.inputs[2] is None else node.inputs[2].shape
    heads, width = (None, None) if shape is None else (shape[1], shape[3])
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    return Pattern(q[0], k[0], v, q[1], width // 2, merged, heads)


def _rows(value: ir.Value | None, uses: int = 1) -> ir.Value | None:
    """x [B, T, H d] of Transpose(Reshape(x), 0 2 1 3), which is read so often."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "Transpose" or len(value.uses()) != uses:
        return None
    split = maker(node.inputs[0], "Reshape")
    rows = None if split is None else split.inputs[0]
    if list(node.attributes["perm"].as_ints()) != [0, 2, 1, 3] or rows is None:
        return None
    return rows if rows.shape is not None and len(rows.shape) == 3 else None


def _merged(value: ir.Value) -> ir.Value | None:
    """Reshape(Transpose(value, 0 2 1 3)) [B, T, H d]."""
    turned = next((use.node for use in value.uses()), None)
    if turned is None or turned.op_type != "Transpose" or len(value.uses()) != 1:
        return None
    rows = next((use.node for use in turned.outputs[0].uses()), None)
    if rows is None or rows.op_type != "Reshape" or len(turned.outputs[0].uses()) != 1:
        return None
    merged = rows.outputs[0]
    three = merged.shape is not None and len(merged.shape) == 3 and not merged.is_graph_output()
    return merged if three and list(turned.attributes["perm"].as_ints()) == [0, 2, 1, 3] else None


def _turned(value: ir.Value | None) -> tuple[ir.Value, Tables] | None:
    """Rows x and the tables of x cos + [-x_2, x_1] sin, x = [x_1, x_2] being split into heads."""
    total = maker(value, "Add")
    if total is None:
        return None
    straight, crossed = maker(total.inputs[0], "Mul"), maker(total.inputs[1], "Mul")
    if straight is None or crossed is None:
        return None
    (x, cos), (swapped, sin) = straight.inputs, crossed.inputs
    concat = maker(swapped, "Concat")
    minus = None if concat is None else maker(concat.inputs[0], "Neg")
    rows = _rows(x, uses=2)
    if concat is None or minus is None or rows is None or x is None or cos is None or sin is None:
        return None
    split = next((use.node for use in x.uses() if use.node.op_type == "Split"), None)
    if split is None or len(split.outputs) != 2 or split.attributes.get_int("axis", 0) % 4 != 3:
        return None
    if split.outputs[0] is not concat.inputs[1] or split.outputs[1] is not minus.inputs[0]:
        return None
    return (rows, (cos, sin)) if _one_angle(cos) and _one_angle(sin) else None


def _one_angle(table: ir.Value) -> bool:
    """Whether both halves of a table's rows are the same; rows of a constant are cut out of it."""
    node = table.producer()
    if node is None or node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    whole, axes = float32(node.inputs[0]), node.inputs[3]
    if whole is None or whole.ndim != 2 or axes is None or axes.const_value is None:
        return False
    if axes.const_value.numpy().tolist() != [0]:
        return False
    first, second = np.split(whole, 2, axis=1)
    return bool(np.array_equal(first, second))
