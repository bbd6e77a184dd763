"""A norm's gain into the weights of the product that reads it: (x g) W = x (diag(g) W)."""

from __future__ import annotations

import onnx_ir as ir

from export.passes._constants import (
    constant,
    drop,
    float32,
    maker,
    replace_constant,
    split_constant,
)


def fold_gains(model: ir.Model) -> int:
    """Fold Mul(x, g [n]) into every MatMul(.., W [n, m]) that reads it, all in float32.

    Does not fire where anything but such products reads the scaled value.

    Returns:
        How many gains were folded.
    """
    graph = model.graph
    fired = 0
    for node in list(graph):
        found = split_constant(node) if node.op_type == "Mul" else None
        if found is None or found[0].ndim != 1 or node.outputs[0].is_graph_output():
            continue
        gain, x = found
        if x.shape is None or x.shape[-1] != gain.shape[0]:  # a gain that widens x
            continue
        products = [use.node for use in node.outputs[0].uses() if use.idx == 0]
        weights = [float32(p.inputs[1]) if p.op_type == "MatMul" else None for p in products]
        known = [weight for weight in weights if weight is not None and weight.ndim == 2]
        if not known or len(known) != len(node.outputs[0].uses()):
            continue
        for product, weight in zip(products, known, strict=True):
            new = constant(graph, gain[:, None] * weight, f"{product.name}.gained")
            product.replace_input_with(1, new)
        drop(graph, node, x)
        fired += 1
    return fired


def fold_key_gains(model: ir.Model) -> int:
    """The keys' gain into the queries': sum (q g_q)(k g_k) = sum (q g_q g_k) k, in float32.

    Pattern: MatMul(Mul(q, g_q), Transpose(Mul(k, g_k))), each read by nothing else.

    Returns:
        How many gains were folded.
    """
    graph = model.graph
    fired = 0
    for node in list(graph):
        if node.op_type != "MatMul":
            continue
        queries, turned = maker(node.inputs[0], "Mul"), maker(node.inputs[1], "Transpose")
        keys = None if turned is None else maker(turned.inputs[0], "Mul")
        if queries is None or turned is None or keys is None:
            continue
        perm = turned.attributes["perm"].as_ints() if "perm" in turned.attributes else []
        if list(perm[-2:]) != [len(perm) - 1, len(perm) - 2]:  # the gain stays on the last axis
            continue
        q, k = split_constant(queries), split_constant(keys)
        if q is None or k is None or q[0].shape != k[0].shape or q[0].ndim != 1:
            continue
        replace_constant(graph, queries, q[1], q[0] * k[0], "query_gain")
        drop(graph, keys, k[1])
        fired += 1
    return fired
