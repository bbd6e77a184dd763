"""Checks of a graph's nodes: their numbers, dtypes and constants."""

import onnx_ir as ir
from torch import nn

from export.passes.graph import rule_dtype
from export.precision import Precision
from export.stages import StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import GraphCheckError

# A node, which of its constants, the number expected and the one found.
Constant = tuple[ir.Node, str, float, float | None]

# What the absence of a node usually means.
LOST = {"Tanh": "a missing Tanh means that the softcap was lost in the export"}


def check_counts(graph: ir.Graph, spec: StageSpec, config: LDLMConfig) -> None:
    """As many nodes of each operator as the stage has; see `StageSpec.counts`."""
    for op_type, expected in spec.counts(config).items():
        found = count_of(graph, op_type)
        if found != expected:
            raise GraphCheckError(
                f"the file has another number of {op_type} nodes than the stage",
                stage=spec.name,
                expected=expected,
                got=found,
                remedy=LOST.get(op_type),
            )


def count_of(graph: ir.Graph, op_type: str) -> int:
    """How many nodes of an operator a graph has."""
    return sum(node.op_type == op_type for node in graph)


def check_layer_norms(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """Data, scale and result of every LayerNormalization are in the rule's dtype."""
    dtype = rule_dtype(precision, spec.component, "layer_norm")
    for node in graph:
        if node.op_type != "LayerNormalization":
            continue
        for value in (*node.inputs, node.outputs[0]):
            if value is not None and value.dtype != dtype:
                raise GraphCheckError(
                    "a LayerNormalization is not in the dtype of its policy",
                    stage=spec.name,
                    tensor=value.name,
                    expected=dtype,
                    got=value.dtype,
                )


def check_softcap(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """The Tanh of every capped attention feeds its Softmax, both in the rule's dtype."""
    for node in graph:
        if node.op_type == "Attention" and node.attributes.get_float("softcap"):
            raise GraphCheckError(
                "an Attention node carries a softcap, which TensorRT refuses",
                stage=spec.name,
                tensor=node.name,
            )
    tanhs = [node for node in graph if node.op_type == "Tanh"]
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    if not tanhs:
        return
    dtype = rule_dtype(precision, spec.component, "softcap_softmax")
    for node in (*tanhs, *softmaxes):
        for value in (node.inputs[0], node.outputs[0]):
            if value is None or value.dtype != dtype:
                raise GraphCheckError(
                    f"a {node.op_type} of the capped softmax is not in the dtype of its policy",
                    stage=spec.name,
                    tensor=node.name,
                    expected=dtype,
                    got=None if value is None else value.dtype,
                )
    for node in softmaxes:
        if not _reaches(node, "Tanh", through=("Mul",)):
            raise GraphCheckError(
                "a Softmax is not fed by the softcap", stage=spec.name, tensor=node.name
            )


def check_integer_products(graph: ir.Graph, spec: StageSpec, module: nn.Module) -> int:
    """One MatMulInteger per quantised layer, each with its own activations' zero point."""
    from export.quantised import QuantisedLinear

    expected = sum(isinstance(child, QuantisedLinear) for child in module.modules())
    nodes = [node for node in graph if node.op_type == "MatMulInteger"]
    if len(nodes) != expected and spec.whole:  # `check_shares` counts the others together
        raise GraphCheckError(
            "the file has another number of integer products than the policy has layers",
            stage=spec.name,
            expected=expected,
            got=len(nodes),
            remedy="a layer that stayed in floats, or was merged with another, shows up here",
        )
    for node in nodes:
        codes, weight, zero = node.inputs if len(node.inputs) == 3 else (None, None, None)
        source = None if codes is None else codes.producer()
        if source is None or source.op_type != "DynamicQuantizeLinear":
            got = "no DynamicQuantizeLinear before it, or other inputs"
        elif codes is not source.outputs[0] or zero is not source.outputs[2]:
            got = "another zero point than its activations'"
        elif weight is None or weight.const_value is None or weight.dtype != ir.DataType.INT8:
            got = "no int8 weight"
        else:
            continue
        raise GraphCheckError(
            "an integer product does not read what it should",
            stage=spec.name,
            tensor=node.name,
            expected="the codes and zero point of one DynamicQuantizeLinear, and an int8 weight",
            got=got,
            remedy="export it anew: a tool has changed the graph",
        )
    return len(nodes)


def check_constants(graph: ir.Graph, spec: StageSpec, config: LDLMConfig) -> None:
    """Every eps and cap is the config's: a changed one can hide where no input comes near it."""
    found: list[Constant] = []
    scale = config.softcap * config.d_head**0.5
    for node in graph:
        if node.op_type == "LayerNormalization":
            eps = node.attributes.get_float("epsilon", 1e-5)
            found.append((node, "epsilon", config.norm_eps, eps))
        if node.op_type in ("Clip", "Max"):
            found.append((node, "eps", config.norm_eps, _scalar(node.inputs[1])))
        if node.op_type == "Tanh":
            before = node.inputs[0].producer() if node.inputs[0] is not None else None
            divisor = None if before is None else _scalar(before.inputs[1])
            found.append((node, "cap * sqrt(d_head) before it", scale, divisor))
            found += _caps(node, config)
    for node, what, expected, got in found:
        # Half constants are rounded to 11 or 8 bits; what is looked for is another number.
        if got is None or abs(got - expected) > 0.01 * expected:
            raise GraphCheckError(
                f"a {node.op_type} has another constant than the config",
                stage=spec.name,
                tensor=f"{node.name}: {what}",
                expected=expected,
                got=got,
            )


def _caps(tanh: ir.Node, config: LDLMConfig) -> list[Constant]:
    """The factor of every product that reads a Tanh, which should be the cap."""
    uses = tanh.outputs[0].uses()
    factors = [_scalar(node.inputs[1 - index]) for node, index in uses]
    return [(tanh, "cap after it", config.softcap, factor) for factor in factors]


def _scalar(value: ir.Value | None) -> float | None:
    """The number that a value always is, if it is a constant of one element."""
    if value is None or value.const_value is None:
        return None
    array = value.const_value.numpy()
    return float(array.reshape(-1)[0]) if array.size == 1 else None


def _reaches(node: ir.Node, op_type: str, through: tuple[str, ...]) -> bool:
    """Whether an op of this type is upstream, with only `through` between."""
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is None:
            continue
        if producer.op_type == op_type:
            return True
        if producer.op_type in through and _reaches(producer, op_type, through):
            return True
    return False
