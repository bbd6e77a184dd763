"""Checks of a finished ONNX file. Each either adds to the evidence or fails with a reason.

They read the file, not the exporter's objects: what is checked is what will be deployed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import onnx_ir as ir
from torch import Tensor, nn

from export.precision import ANY, Rule
from export.stages import DYNAMIC, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import GraphCheckError

# A node, which of its constants, the number expected and the one found.
Constant = tuple[ir.Node, str, float, float | None]

# Constants that are no parameters: axes, epsilons, shapes.
SCALARS_ALLOWED = 4096


class Evidence(TypedDict):
    """What the checks found, for the manifest."""

    opset: int
    nodes: int
    parameter_bytes: int
    external_data: str
    layer_norms_float32: int
    capped_attentions: int
    fused_attentions: int
    integer_products: int


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every distinct parameter and buffer of a module; what its graph should hold."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def check_graph(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    module: nn.Module,
    rules: tuple[Rule, ...],
    opset: int,
) -> Evidence:
    """Run every check on one file.

    Args:
        path: the .onnx file, its external data beside it.
        spec, config: what the stage should look like.
        module: the module it was traced from, with the policy applied.
        rules: the policy.
        opset: the opset asked for.

    Raises:
        GraphCheckError: naming what is not as asked.
    """
    model = ir.load(path)
    graph = model.graph
    _check_opset(model, spec, opset)
    _check_signature(graph, spec, config)
    _check_inputs_used(graph, spec)
    norms = _check_layer_norms(graph, spec, module, rules)
    capped = _check_softcap(graph, spec, config, rules)
    if spec.name == "denoiser_step":
        _check_whole_rows(graph, spec)
    integers = _check_integer_products(graph, spec, module)
    _check_constants(graph, spec, config)
    data = _check_external_data(path, graph, spec)
    size = _check_size(graph, spec, config, module)
    return Evidence(
        opset=opset,
        nodes=len(graph),
        parameter_bytes=size,
        external_data=data,
        layer_norms_float32=norms,
        capped_attentions=capped,
        fused_attentions=sum(node.op_type == "Attention" for node in graph),
        integer_products=integers,
    )


def check_split(evidence: Mapping[str, Evidence]) -> None:
    """The loop's two graphs have all parameters and integer products of the denoiser between them.

    Args:
        evidence: of the graphs that share weights, by stage.

    Raises:
        GraphCheckError: some are in neither.
    """
    parts = ("conditioning", "denoiser_step")
    if not all(name in evidence for name in parts):
        return
    found = sum(evidence[name]["parameter_bytes"] for name in parts)
    expected = evidence["denoiser"]["parameter_bytes"] - SCALARS_ALLOWED
    if found < expected:
        raise GraphCheckError(
            "the loop's graphs lack parameters of the denoiser",
            stage=" and ".join(parts),
            expected=f"{expected:,} bytes or more",
            got=f"{found:,} bytes",
        )
    products = sum(evidence[name]["integer_products"] for name in parts)
    if products != evidence["denoiser"]["integer_products"]:
        raise GraphCheckError(
            "the loop's graphs have another number of integer products than the denoiser",
            stage=" and ".join(parts),
            expected=evidence["denoiser"]["integer_products"],
            got=products,
        )


def _check_opset(model: ir.Model, spec: StageSpec, opset: int) -> None:
    found = model.opset_imports.get("")
    if found != opset:
        raise GraphCheckError(
            "the file has another opset than asked for", stage=spec.name, expected=opset, got=found
        )
    foreign = [domain for domain in model.opset_imports if domain]
    if foreign or model.functions:
        raise GraphCheckError(
            "the file uses operators of other domains",
            stage=spec.name,
            expected="standard ONNX only",
            got=", ".join(foreign) or "local functions",
        )


def _check_signature(graph: ir.Graph, spec: StageSpec, config: LDLMConfig) -> None:
    """Names, order, dtypes and shapes; dynamic axes by their dim_param."""
    for values, tensors in ((graph.inputs, spec.inputs), (graph.outputs, spec.outputs)):
        found = [value.name for value in values]
        names = [tensor.name for tensor in tensors]
        if found != names:
            raise GraphCheckError(
                "the file has other inputs or outputs", stage=spec.name, expected=names, got=found
            )
        for value, tensor in zip(values, tensors, strict=True):
            dims = [] if value.shape is None else list(value.shape)
            got = [str(d.value) if isinstance(d, ir.SymbolicDim) else d for d in dims]
            expected = list(tensor.shape(config, {axis: axis for axis in DYNAMIC}))
            dtype = value.dtype.numpy().name if value.dtype is not None else "no dtype"
            if got != expected or dtype != tensor.dtype:
                raise GraphCheckError(
                    "an input or output is not as specified; a number where a name is expected "
                    "means that the export was specialised to its example",
                    stage=spec.name,
                    tensor=tensor.name,
                    expected=f"{tensor.dtype} {expected}",
                    got=f"{dtype} {got}",
                )


def _check_inputs_used(graph: ir.Graph, spec: StageSpec) -> None:
    for value in graph.inputs:
        if not value.uses():
            raise GraphCheckError(
                "the graph does not use an input",
                stage=spec.name,
                tensor=value.name,
                remedy="give every input an example tensor of its own when exporting",
            )


def _check_layer_norms(
    graph: ir.Graph, spec: StageSpec, module: nn.Module, rules: tuple[Rule, ...]
) -> int:
    """As many LayerNormalization nodes as modules; data, scale and result in the rule's dtype."""
    from ldlm.layers import BiaslessLayerNorm

    expected = sum(isinstance(child, BiaslessLayerNorm) for child in module.modules())
    if spec.name == "conditioning":  # the norms' gains, without the norms
        expected = 0
    elif spec.role == "folded":  # r_0 is a constant, and with it the norm of the query's MLP
        expected -= 1
    nodes = [node for node in graph if node.op_type == "LayerNormalization"]
    if len(nodes) != expected:
        raise GraphCheckError(
            "the file has another number of LayerNormalization nodes than the module has norms",
            stage=spec.name,
            expected=expected,
            got=len(nodes),
        )
    dtype = rule_dtype(rules, spec.weights, "layer_norm")
    for node in nodes:
        if spec.name == "denoiser_step" and dtype == ir.DataType.FLOAT and len(node.inputs) < 3:
            raise GraphCheckError(
                "a norm does not take its gain and bias from the table",
                stage=spec.name,
                tensor=node.name,
            )
        for value in (*node.inputs, node.outputs[0]):
            if value is not None and value.dtype != dtype:
                raise GraphCheckError(
                    "a LayerNormalization is not in the dtype of its policy",
                    stage=spec.name,
                    tensor=value.name,
                    expected=dtype,
                    got=value.dtype,
                )
    return len(nodes)


def _check_softcap(
    graph: ir.Graph, spec: StageSpec, config: LDLMConfig, rules: tuple[Rule, ...]
) -> int:
    """One Tanh per capped attention, feeding a Softmax, both in the rule's dtype."""
    for node in graph:
        if node.op_type == "Attention" and node.attributes.get_float("softcap"):
            raise GraphCheckError(
                "an Attention node carries a softcap, which TensorRT refuses",
                stage=spec.name,
                tensor=node.name,
            )
    expected = spec.capped_attentions(config)
    tanhs = [node for node in graph if node.op_type == "Tanh"]
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    for found, what in ((len(tanhs), "Tanh"), (len(softmaxes), "Softmax")):
        if found != expected:
            raise GraphCheckError(
                f"the file does not have one {what} per capped attention",
                stage=spec.name,
                expected=expected,
                got=found,
                remedy="a missing Tanh means that the softcap was lost in the export",
            )
    if not expected:
        return 0
    dtype = rule_dtype(rules, spec.weights, "softcap_softmax")
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
    return expected


def _check_whole_rows(graph: ir.Graph, spec: StageSpec) -> None:
    """No float32 attention of the loop has its heads moved to and fro."""
    for node in graph:
        wide = node.op_type == "Attention" and node.outputs[0].dtype == ir.DataType.FLOAT
        if wide and not node.attributes.get_int("q_num_heads", 0):
            raise GraphCheckError(
                "an attention of the loop does not read whole rows",
                stage=spec.name,
                tensor=node.name,
                remedy="export.passes.fuse_rotary does not know the pattern it was traced to",
            )


def _check_integer_products(graph: ir.Graph, spec: StageSpec, module: nn.Module) -> int:
    """One MatMulInteger per quantised layer, each with its own activations' zero point."""
    from export.quantised import QuantisedLinear

    expected = sum(isinstance(child, QuantisedLinear) for child in module.modules())
    nodes = [node for node in graph if node.op_type == "MatMulInteger"]
    if len(nodes) != expected and spec.role != "loop":  # `check_split` counts these together
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


def _check_constants(graph: ir.Graph, spec: StageSpec, config: LDLMConfig) -> None:
    """Every eps and cap is the config's: a changed one can hide where no input comes near it."""
    found: list[Constant] = []
    scale = config.softcap * config.d_head**0.5
    for node in graph:
        if node.op_type == "LayerNormalization":
            eps = node.attributes.get_float("epsilon", 1e-5)
            found.append((node, "epsilon", config.norm_eps, eps))
        if node.op_type in ("Clip", "Max"):
            found.append((node, "eps", config.norm_eps, _scalar(node.inputs[1])))
        if node.op_type == "Tanh" and spec.role == "folded":  # the scale is in the queries' gain
            found += _caps(node, config)
        elif node.op_type == "Tanh":
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


def _check_external_data(path: Path, graph: ir.Graph, spec: StageSpec) -> str:
    """All external tensors in the one file that the stage's weights belong to."""
    expected = spec.data
    found = {
        str(value.const_value.location)
        for value in graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    if found != {expected} or not (path.parent / expected).is_file():
        raise GraphCheckError(
            "the weights are not in one file beside the graph",
            stage=spec.name,
            expected=expected,
            got=sorted(found) or "none",
        )
    return expected


def _check_size(graph: ir.Graph, spec: StageSpec, config: LDLMConfig, module: nn.Module) -> int:
    """The file holds each parameter once and hardly anything else."""
    found: Counter[str] = Counter()
    for array in _constants(graph):
        found[array.dtype.numpy().name] += array.nbytes
    expected: Counter[str] = Counter()
    foldable: Counter[str] = Counter()  # a residual scale's two numbers become one factor, 1 + s
    for tensor in tensors_of(module).values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        expected[dtype] += tensor.nbytes
        foldable[dtype] += tensor.nbytes if tensor.numel() <= 2 else 0
    surplus = {dtype: found[dtype] - expected[dtype] for dtype in expected | found}
    # A float32 constant that is cast before its only use may have been folded into its half.
    for half in ("float16", "bfloat16"):
        foldable["float32"] += 2 * max(0, surplus.get(half, 0) + foldable[half])
    for dtype, difference in surplus.items():
        # A graph of the loop has its share of the parameters. A folded one has, in place of the
        # weights that make them, at most five tables of what depends on the position.
        least = -foldable[dtype] if spec.role in ("plain", "ids") else -expected[dtype]
        most = SCALARS_ALLOWED
        if spec.role == "folded":
            most += 5 * 4 * config.n_positions * config.d_model
        if not least <= difference <= most:
            raise GraphCheckError(
                "the file does not hold the stage's parameters once each",
                stage=spec.name,
                tensor=f"all of {dtype}",
                expected=f"{expected[dtype]:,} bytes",
                got=f"{found[dtype]:,} bytes",
                remedy="shared weights written twice, or weights folded away, show up here",
            )
    return sum(found.values())


def _constants(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    for value in graph.initializers.values():
        if value.const_value is not None:
            yield value.const_value
    for node in graph:
        if node.op_type == "Constant" and (attribute := node.attributes.get("value")) is not None:
            yield attribute.as_tensor()


def rule_dtype(rules: tuple[Rule, ...], stage: str, what: str) -> ir.DataType:
    """The dtype that a policy gives to a kind of computation in a stage."""
    rule = next(r for r in rules if r.applies(stage) and r.what in (ANY, what))
    return {
        "float32": ir.DataType.FLOAT,
        "float16": ir.DataType.FLOAT16,
        "bfloat16": ir.DataType.BFLOAT16,
    }[rule.dtype]


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
