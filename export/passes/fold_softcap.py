"""The softcap's scale into the queries' gain: Q K^T / c = (Q / c) K^T."""

from __future__ import annotations

import onnx_ir as ir

from export.passes._constants import drop, maker, replace_constant, split_constant


def fold_softcap(model: ir.Model) -> int:
    """Fold Tanh(Div(MatMul(Mul(q, g), k), c)) into g / c, all in float32.

    The scores are the largest tensor of the model; this saves one pass over them.

    Returns:
        How many scales were folded.
    """
    graph = model.graph
    fired = 0
    for node in list(graph):
        scaled = maker(node.inputs[0], "Div") if node.op_type == "Tanh" else None
        cap = None if scaled is None else split_constant(scaled)
        if scaled is None or cap is None or cap[0].size != 1 or scaled.inputs[0] is not cap[1]:
            continue
        scores = maker(cap[1], "MatMul")
        queries = None if scores is None else maker(scores.inputs[0], "Mul")
        gain = None if queries is None else split_constant(queries)
        if queries is None or gain is None:
            continue
        capped = gain[0] / cap[0].reshape(())
        replace_constant(graph, queries, gain[1], capped, "capped_query_gain")
        drop(graph, scaled, cap[1])
        fired += 1
    return fired
