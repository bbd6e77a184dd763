"""Let the token decoder end in token ids."""

import onnx_ir as ir

from export.stages import StageSpec


def argmax_tail(model: ir.Model, spec: StageSpec) -> int:
    """Replace the one output, logits [B, T, vocab], by its argmax [B, T] int64.

    A cast to float32 before the output is left out: it changes no order, and on a device it
    would write twice the bytes of the half logits.

    Args:
        model: a graph with one output.
        spec: names the new output.
    """
    name = spec.outputs[0].name
    (logits,) = model.graph.outputs
    cast = logits.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else logits
    shape = None if logits.shape is None else ir.Shape(list(logits.shape)[:-1])
    node = ir.Node(
        "",
        "ArgMax",
        inputs=[source],
        attributes=[ir.AttrInt64("axis", -1), ir.AttrInt64("keepdims", 0)],
        outputs=[ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.INT64))],
        name=name,
    )
    model.graph.append(node)
    model.graph.outputs[0] = node.outputs[0]
    if source is not logits and cast is not None:
        model.graph.remove(cast, safe=True)
    return 1
