"""Ways to damage a graph: the faults that exporters, converters and people make.

Each takes one stage's graph and changes it in place. A damage that finds nothing to change is an
error of its own, or a self-test would pass for want of a target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from ldlm.errors import ArtifactError

LATENTS, DENOISER = "latent_decoder", "denoiser"
LOGITS, IDS = "token_decoder_logits", "token_decoder"

Change = Callable[[ir.Model], None]
Where = Callable[[ir.Node], Any]


@dataclass(frozen=True)
class Damage:
    """One fault in one stage."""

    name: str
    stage: str
    apply: Change


def _nothing(what: str) -> ArtifactError:
    return ArtifactError("a damage finds nothing to damage", got=what)


def _first(model: ir.Model, op_type: str, where: Where = bool) -> ir.Node:
    for node in model.graph:
        if node.op_type == op_type and (where is bool or where(node)):
            return node
    raise _nothing(f"no such {op_type} in the graph")


def _value(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """The array of a constant, or None."""
    tensor = None if value is None else convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _makers(node: ir.Node) -> list[str | None]:
    """The types of the operators that made its inputs."""
    producers = (None if value is None else value.producer() for value in node.inputs)
    return [None if producer is None else producer.op_type for producer in producers]


def _readers(node: ir.Node) -> set[str]:
    """The types of the operators that read its first output."""
    return {user.op_type for user, _ in node.outputs[0].uses()}


def _scale(model: ir.Model, node: ir.Node, factor: float) -> None:
    """Multiply the constant among a node's inputs, in its dtype."""
    for index, old in enumerate(node.inputs):
        if old is None or (array := _value(old)) is None:
            continue
        name = f"damage_{len(model.graph.initializers)}"
        tensor = ir.tensor((factor * array.astype(np.float32)).astype(array.dtype), name=name)
        type_ = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=type_)
        model.graph.register_initializer(value)
        node.replace_input_with(index, value)
        return
    raise _nothing(f"no constant in {node.name}")


def _scaled(op_type: str, factor: float, where: Where = bool) -> Change:
    """A constant of one node is another: a stale or wrongly converted one."""
    return lambda model: _scale(model, _first(model, op_type, where), factor)


def _bypassed(op_type: str, where: Where = bool) -> Change:
    """One node is left out: its first input that is no constant goes on."""

    def apply(model: ir.Model) -> None:
        node = _first(model, op_type, where)
        source = next(v for v in node.inputs if v is not None and _value(v) is None)
        convenience.replace_all_uses_with(node.outputs[0], source)

    return apply


def _swapped(op_type: str, where: Where) -> Change:
    """The first two inputs of one node in each other's place."""

    def apply(model: ir.Model) -> None:
        node = _first(model, op_type, where)
        first, second = node.inputs[:2]
        node.replace_input_with(0, second)
        node.replace_input_with(1, first)

    return apply


def _in_half(op_type: str, where: Where = bool) -> Change:
    """Compute one node in float16, between casts, as a converter would."""

    def apply(model: ir.Model) -> None:
        node = _first(model, op_type, where)
        half = ir.DataType.FLOAT16
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == ir.DataType.FLOAT:
                cast = _cast(value, half, f"{node.name}_in{index}")
                node.replace_input_with(index, cast.outputs[0])
                model.graph.insert_before(node, cast)
        old = node.outputs[0]
        wide = _cast(old, old.dtype or ir.DataType.FLOAT, f"{node.name}_out")
        uses = [(user, i) for user, i in old.uses() if user is not wide]
        for user, i in uses:
            user.replace_input_with(i, wide.outputs[0])
        old.dtype = half
        model.graph.insert_after(node, wide)

    return apply


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=f"{name}_value", shape=value.shape, type=ir.TensorType(dtype))
    to = ir.AttrInt64("to", int(dtype))
    return ir.Node("", "Cast", inputs=[value], attributes=[to], outputs=[output], name=name)


def _attribute(op_type: str, attribute: ir.Attr) -> Change:
    def apply(model: ir.Model) -> None:
        _first(model, op_type).attributes[attribute.name] = attribute

    return apply


def _roll(fragment: str) -> Change:
    """Shift a table by one row."""

    def apply(model: ir.Model) -> None:
        for name, value in model.graph.initializers.items():
            if fragment in name and value.const_value is not None:
                array = np.roll(value.const_value.numpy(), 1, axis=0)
                value.const_value = ir.tensor(array, name=name)
                return
        raise _nothing(f"no weight named {fragment}")

    return apply


def _other_cap(model: ir.Model) -> None:
    """cap tanh(S / (cap sqrt(d_head))) with a cap of 62.5: both constants change."""
    tanh = _first(model, "Tanh")
    divide = tanh.inputs[0].producer() if tanh.inputs[0] is not None else None
    if divide is None:
        raise _nothing("no product before the Tanh")
    (multiply, _), *_ = tanh.outputs[0].uses()
    _scale(model, divide, 1.25)
    _scale(model, multiply, 1.25)


def _swapped_modulation(model: ir.Model) -> None:
    """The shift in the place of the scale of the first modulation."""
    split = _first(model, "Split", lambda n: len(n.outputs) == 6)
    shift, scale = split.outputs[0], split.outputs[1]
    uses = [(value, list(value.uses())) for value in (shift, scale)]
    for (_, users), other in zip(uses, (scale, shift), strict=True):
        for user, index in users:
            user.replace_input_with(index, other)


def _argmin(model: ir.Model) -> None:
    _first(model, "ArgMax").op_type = "ArgMin"


def _has_weight(node: ir.Node) -> bool:
    return _value(node.inputs[1]) is not None


def _by_residual_scale(node: ir.Node) -> bool:
    """(1 + s) x, which goes into a sum."""
    numbers = [array is not None and array.size == 1 for array in map(_value, node.inputs)]
    return sum(numbers) == 1 and _readers(node) == {"Add"}


def _by_norm_of_queries(node: ir.Node) -> bool:
    """q divided by its root mean square: the gain is the d_head long one."""
    gains = [_value(v) for user, _ in node.outputs[0].uses() for v in user.inputs]
    heads = any(g is not None and g.ndim == 1 and 1 < g.size <= 64 for g in gains)
    return heads and _makers(node)[1] == "Clip"


def _of_inputs(node: ir.Node) -> bool:
    """[x_t ; x0_prev]."""
    return all(value is not None and value.is_graph_input() for value in node.inputs)


def _joins_stream(node: ir.Node) -> bool:
    """A residual sum: no constant operand, and what it makes is read by a norm."""
    return all(_value(v) is None for v in node.inputs) and "LayerNormalization" in _readers(node)


_SCALE = ir.AttrFloat32("scale", 0.2)
_CAUSAL = ir.AttrInt64("is_causal", 1)
_EPS = ir.AttrFloat32("epsilon", 1e-3)
_TANH_GELU = ir.AttrString("approximate", "tanh")

DAMAGES: tuple[Damage, ...] = (
    Damage("softcap removed", LATENTS, _bypassed("Tanh")),
    Damage("cap changed", LATENTS, _other_cap),
    Damage("softcap without the scale", LATENTS,
           _scaled("Div", 0.125, lambda node: "Tanh" in _readers(node))),
    Damage("keys swapped", LATENTS,
           _swapped("Concat", lambda node: set(_makers(node)) == {"Split"})),
    Damage("residual scale dropped", LATENTS, _bypassed("Mul", _by_residual_scale)),
    Damage("query norm dropped", LATENTS, _bypassed("Div", _by_norm_of_queries)),
    Damage("GELU approximated", LATENTS, _attribute("Gelu", _TANH_GELU)),
    Damage("position table shifted", LATENTS, _roll("positions")),
    Damage("LayerNorm eps changed", LATENTS, _attribute("LayerNormalization", _EPS)),
    Damage("RMSNorm eps changed", LATENTS, _scaled("Clip", 1000)),
    Damage("LayerNorm in half", LATENTS, _in_half("LayerNormalization")),
    Damage("RMSNorm in half", LATENTS, _in_half("ReduceL2")),
    Damage("softcap in half", LATENTS, _in_half("Tanh")),
    Damage("softmax in half", LATENTS, _in_half("Softmax")),
    Damage("residual in half", LATENTS, _in_half("Add", _joins_stream)),
    Damage("latent mean and std lost", LATENTS,
           _bypassed("Mul", lambda n: any(v is not None and v.is_graph_input() for v in n.inputs))),
    Damage("a weight scaled", LATENTS, _scaled("MatMul", 1.01, _has_weight)),
    Damage("GELU exact", DENOISER, _attribute("Gelu", ir.AttrString("approximate", "none"))),
    Damage("x_t and x0_prev swapped", DENOISER, _swapped("Concat", _of_inputs)),
    Damage("shift and scale swapped", DENOISER, _swapped_modulation),
    Damage("rotation's sign lost", DENOISER, _bypassed("Neg")),
    Damage("attention scale changed", DENOISER, _attribute("Attention", _SCALE)),
    Damage("attention made causal", DENOISER, _attribute("Attention", _CAUSAL)),
    Damage("LayerNorm eps changed", DENOISER, _attribute("LayerNormalization", _EPS)),
    Damage("LayerNorm in half", DENOISER, _in_half("LayerNormalization")),
    Damage("time embedding in half", DENOISER, _in_half("Cos")),
    Damage("residual in half", DENOISER, _in_half("Add", _joins_stream)),
    Damage("rotary table shifted", DENOISER, _roll("rotary.cos")),
    Damage("a weight scaled", DENOISER, _scaled("MatMul", 1.01, _has_weight)),
    Damage("SiLU dropped", LOGITS, _bypassed("Mul", lambda node: "Sigmoid" in _makers(node))),
    Damage("rotation's sign lost", LOGITS, _bypassed("Neg")),
    Damage("LayerNorm eps changed", LOGITS, _attribute("LayerNormalization", _EPS)),
    Damage("LayerNorm in half", LOGITS, _in_half("LayerNormalization")),
    Damage("residual in half", LOGITS, _in_half("Add", _joins_stream)),
    Damage("a weight scaled", LOGITS, _scaled("MatMul", 1.01, _has_weight)),
    Damage("argmin in place of argmax", IDS, _argmin),
)  # fmt: skip # the items of a row belong together
