"""Remove what the exporter notes about the machine it ran on."""

import onnx_ir as ir


def strip_metadata(model: ir.Model) -> int:
    """Drop stack traces and source paths, so that a graph depends on the model alone."""
    fired = 0
    holders = [model, model.graph, *model.graph]
    for node in model.graph:
        holders.extend(node.outputs)
    for holder in (*holders, *model.graph.inputs, *model.graph.initializers.values()):
        fired += bool(holder.metadata_props)
        holder.metadata_props.clear()
        holder.doc_string = None
    return fired
