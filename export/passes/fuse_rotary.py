"""Rotary attention on rows as the products give them: no head is moved to and fro.

As traced, queries, keys and values are split into heads and transposed, queries and keys are turned
by six operators each, and the result is transposed and merged again. ONNX has operators for the
rotation and the attention that read and write [B, T, H * d_head].
"""

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import MatchResult, RewriteRule

from export.passes.graph import float32, number
from export.passes.rules import apply_rule
from export.precision import Precision
from export.stages import StageSpec
from ldlm.errors import GraphCheckError

FLOAT = ir.DataType.FLOAT
Tables = tuple[ir.Value, ir.Value]
SWAPPED = [0, 2, 1, 3]  # [B, T, H, d_head] <-> [B, H, T, d_head]


def fuse_rotary(model: ir.Model, spec: StageSpec) -> int:
    """Replace every rotary Attention of heads by one of rows; float32 alone.

    Does not fire where anything else reads a value in between, nor where a table does not turn
    both elements of a pair by one angle.

    Returns:
        How many attentions were replaced.
    """
    rule = RewriteRule(_pattern, partial(_rewrite, halves={}), _check)
    fired = apply_rule(model, rule, "Attention")
    RemoveUnusedNodesPass()(model)  # the shapes that the heads were split and merged to
    return fired


def require_rows(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """Every float32 attention of a stage reads rows.

    Raises:
        GraphCheckError: naming the first that does not.
    """
    for node in graph:
        wide = node.op_type == "Attention" and node.outputs[0].dtype == FLOAT
        if wide and not node.attributes.get_int("q_num_heads", 0):
            raise GraphCheckError(
                "a float32 attention does not read whole rows",
                stage=spec.name,
                tensor=node.name,
                remedy="export.passes.fuse_rotary does not know the pattern it was traced to",
            )


def _pattern(op: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    """Attention of heads as `ldlm.layers` is traced, from rows to rows [B, T, H * d_head].

    cos and sin are tables [T, d_head]; attended is [B, H, T, d_head].
    """
    turned = (_turned(op, _heads(op, rows), cos, sin) for rows in (q, k))
    attended = op.Attention(*turned, _heads(op, v), _outputs=["attended"])
    rows = op.Transpose(attended, perm=SWAPPED)
    return op.Reshape(rows, _allow_other_inputs=True, _outputs=["merged"])


def _heads(op: Any, rows: Any) -> Any:
    """[B, T, H * d_head] -> [B, H, T, d_head]."""
    return op.Transpose(op.Reshape(rows, _allow_other_inputs=True), perm=SWAPPED)


def _turned(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    """x cos + [-x_2, x_1] sin, x = [x_1, x_2]."""
    first, second = op.Split(x, axis=3, num_outputs=2, _outputs=2)
    return x * cos + op.Concat(op.Neg(second), first, axis=-1) * sin


def _check(context: Any, attended: Any, merged: ir.Value, **found: ir.Value) -> MatchResult:
    """Success, or why the two operators compute something else than what was found."""
    node, heads, rows = attended.producer(), attended.shape, merged.shape
    others = [found[name].shape for name in ("q", "k", "v")]
    extra = [name for name in ("is_causal", "scale", "softcap") if number(node, name)]
    reason = ""
    if attended.dtype != FLOAT:
        reason = f"it is computed in {attended.dtype}"
    elif extra or len(node.outputs) > 1:
        reason = f"it has {', '.join(extra) or 'more outputs than one'}"
    elif rows is None or len(rows) != 3 or any(shape != rows for shape in others):
        reason = f"its rows are {rows} of {', '.join(map(str, others))}"
    elif heads is None or not isinstance(heads[1], int) or not isinstance(heads[3], int):
        reason = f"the number and width of its heads are not known: {heads}"
    elif merged.is_graph_output():
        reason = "its result is an output of the graph"
    elif turned := [name for name in ("cos", "sin") if not _one_angle(found[name])]:
        reason = f"{turned[0]} does not turn both elements of a pair by one angle"
    return MatchResult().fail(reason, node) if reason else MatchResult()


def _rewrite(
    op: Any,
    halves: dict[Tables, list[ir.Value]],
    attended: Any,
    merged: ir.Value,
    **found: ir.Value,
) -> ir.Value:
    """RotaryEmbedding of queries and keys, and Attention, all of rows.

    `halves` keeps the half tables between calls: they are the same for every block.
    """
    heads, width = attended.shape[1], attended.shape[3]
    tables = found["cos"], found["sin"]
    if tables not in halves:
        halves[tables] = _half_tables(op, found["q"], tables, width // 2)
    q, k = (op.RotaryEmbedding(found[n], *halves[tables], num_heads=heads) for n in ("q", "k"))
    output: ir.Value = op.Attention(q, k, found["v"], q_num_heads=heads, kv_num_heads=heads)
    for value in (q, k, output):
        value.dtype, value.shape = FLOAT, merged.shape
    merged.name = None  # else the result would be called after a Reshape that is gone
    return output


def _half_tables(op: Any, rows: ir.Value, tables: Tables, half: int) -> list[ir.Value]:
    """cos and sin as RotaryEmbedding reads them: [B, T, d_head / 2], one angle for a pair."""
    size = op.Constant(value=ir.tensor([half]))
    shape = op.Concat(op.Shape(rows, start=0, end=2), size, axis=0)
    found = []
    for table in tables:
        first, _ = op.Split(table, axis=1, num_outputs=2, _outputs=2)
        found.append(op.Expand(first, shape))
        first.dtype = found[-1].dtype = FLOAT
    return found


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
