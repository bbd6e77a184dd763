"""Checks of a finished ONNX file. Each either adds to the evidence or fails with a reason.

They read the file, not the exporter's objects: what is checked is what will be deployed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

import onnx_ir as ir
from torch import Tensor, nn

from export.node_checks import (
    check_constants,
    check_counts,
    check_integer_products,
    check_layer_norms,
    check_softcap,
    count_of,
)
from export.passes import PASSES
from export.precision import Precision
from export.stages import DYNAMIC, StageSpec, compared, stages_of
from ldlm.config import LDLMConfig
from ldlm.errors import GraphCheckError

# Constants that are no parameters: axes, epsilons, shapes.
SCALARS_ALLOWED = 4096


class Evidence(TypedDict):
    """What the checks found, for the manifest."""

    opset: int
    nodes: int
    parameter_bytes: int
    external_data: str
    layer_norms: int
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
    precision: Precision,
    opset: int,
) -> Evidence:
    """Run every check on one file.

    Args:
        path: the .onnx file, its external data beside it.
        spec, config: what the stage should look like.
        module: the module it was traced from, with the policy applied.
        precision: of the graph.
        opset: the opset asked for.

    Raises:
        GraphCheckError: naming what is not as asked.
    """
    model = ir.load(path)
    graph = model.graph
    _check_opset(model, spec, opset)
    _check_signature(graph, spec, config)
    _check_inputs_used(graph, spec)
    check_counts(graph, spec, config)
    check_layer_norms(graph, spec, precision)
    check_softcap(graph, spec, precision)
    integers = check_integer_products(graph, spec, module)
    check_constants(graph, spec, config)
    for name in spec.passes:
        PASSES[name].check(graph, spec, precision)
    data = _check_external_data(path, graph, spec)
    size = _check_size(graph, spec, module)
    return Evidence(
        opset=opset,
        nodes=len(graph),
        parameter_bytes=size,
        external_data=data,
        layer_norms=count_of(graph, "LayerNormalization"),
        capped_attentions=count_of(graph, "Tanh"),
        fused_attentions=count_of(graph, "Attention"),
        integer_products=integers,
    )


def check_shares(component: str, evidence: Mapping[str, Evidence]) -> None:
    """Stages that each hold a share of a component's parameters hold all between them.

    Args:
        component: whose weights they read.
        evidence: of its graphs, by stage.

    Raises:
        GraphCheckError: some parameters or integer products are in none.
    """
    shares = [spec.name for spec in stages_of(component) if not spec.whole]
    if not shares:
        return
    whole = evidence[compared(component).name]
    stages = " and ".join(shares)
    found = sum(evidence[name]["parameter_bytes"] for name in shares)
    expected = whole["parameter_bytes"] - SCALARS_ALLOWED
    if found < expected:
        raise GraphCheckError(
            "graphs that share a component do not hold all its parameters",
            stage=stages,
            expected=f"{expected:,} bytes or more",
            got=f"{found:,} bytes",
        )
    products = sum(evidence[name]["integer_products"] for name in shares)
    if products != whole["integer_products"]:
        raise GraphCheckError(
            "graphs that share a component do not hold all its integer products",
            stage=stages,
            expected=whole["integer_products"],
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


def _check_size(graph: ir.Graph, spec: StageSpec, module: nn.Module) -> int:
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
        least = -foldable[dtype] if spec.whole else -expected[dtype]
        if not least <= difference <= SCALARS_ALLOWED:
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
