"""Give a graph the extra outputs of its debug export."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ldlm.errors import GraphCheckError


def expose(model: ir.Model, debug: ir.Model, stage: str) -> dict[str, str]:
    """Make the values that `debug` names outputs of `model`, under the same names.

    Pattern: two exports of one module, the second with more outputs. Without those the two are
    the same sequence of operators, so a value is found by the place of the node that makes it.

    Args:
        model: the graph to be looked into, changed in place.
        debug: the export with more outputs; it is used up.
        stage: its name, for errors.

    Returns:
        The graph's name for each name of `debug`: another one only where the value is one of the
        graph's own outputs.

    Raises:
        GraphCheckError: the operators are not the same; naming the first that differs.
    """
    own = len(model.graph.outputs)
    named = {str(value.name): _source(value) for value in debug.graph.outputs[own:]}
    del debug.graph.outputs[own:]
    RemoveUnusedNodesPass()(debug)
    _require_same(model, debug, named, stage)
    place = {node: index for index, node in enumerate(debug.graph)}
    nodes = list(model.graph)
    names = {}
    for name, value in named.items():
        producer = value.producer()
        if producer is None or producer not in place:
            raise GraphCheckError(
                "an intermediate is not part of the graph", stage=stage, tensor=name
            )
        found = nodes[place[producer]].outputs[value.index() or 0]
        if found not in model.graph.outputs:
            found.name = name
            model.graph.outputs.append(found)
        names[name] = str(found.name)
    return names


def _source(value: ir.Value) -> ir.Value:
    """The value behind the copies that an exporter makes of a tensor returned twice."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and producer.inputs[0]:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def _require_same(model: ir.Model, debug: ir.Model, named: dict[str, ir.Value], stage: str) -> None:
    after = {value.producer(): name for name, value in named.items()}
    last = "the inputs"
    found = [node.op_type for node in model.graph] + ["the end"]
    expected = [node.op_type for node in debug.graph] + ["the end"]
    nodes: list[ir.Node | None] = [*debug.graph, None]
    for got, wanted, node in zip(found, expected, nodes, strict=False):
        if got != wanted:
            raise GraphCheckError(
                "the file's operators are not those of the model",
                stage=stage,
                tensor=f"after {last}",
                expected=wanted,
                got=got,
                remedy="the first other operator follows the tap named above; export it again",
            )
        last = after.get(node, last)
