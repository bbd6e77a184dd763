"""Switch the rounding of activations off: products of integers become float32 ones."""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.passes.graph import constant


def dequantise(model: ir.Model) -> int:
    """MatMulInteger(q_x, q_w, z_x), with q_x, s_x, z_x of x, becomes MatMul(x, q_w); s_x is 1.

    The weights keep their rounded values: what is left is the formula of the graph.

    Returns:
        How many products were replaced.
    """
    graph = model.graph
    fired = 0
    sources = set()
    for node in list(graph):
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if node.op_type != "MatMulInteger" or source is None:
            continue
        codes = node.inputs[1]
        if source.op_type != "DynamicQuantizeLinear" or codes is None or codes.const_value is None:
            continue
        weight = constant(graph, codes.const_value.numpy().astype(np.float32), f"{codes.name}.wide")
        product = ir.Node("", "MatMul", inputs=[source.inputs[0], weight], name=node.name)
        old, new = node.outputs[0], product.outputs[0]
        new.name, new.dtype, new.shape = str(old.name), ir.DataType.FLOAT, old.shape
        graph.insert_before(node, product)
        old.replace_all_uses_with(new)
        graph.remove(node, safe=True)
        sources.add(source)
        fired += 1
    for source in sources:
        one = constant(graph, np.ones((), np.float32), "one")
        source.outputs[1].replace_all_uses_with(one)
    RemoveUnusedNodesPass()(model)
    return fired
