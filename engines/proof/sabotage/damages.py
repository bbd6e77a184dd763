"""Ways to damage a graph: the faults that exporters, converters and people make.

Each takes one stage's graph and changes it in place. A damage that finds nothing to change is an
error of its own, or a self-test would pass for want of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from ldlm.errors import ArtifactError

LATENTS, DENOISER, LOGITS, IDS = (
    "latent_decoder", "denoiser", "token_decoder_logits", "token_decoder",
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One fault in one stage."""

    name: str
    stage: str
    apply: Callable[[ir.Model], None]


def _nodes(model: ir.Model, op_type: str) -> Iterator[ir.Node]:
    return (node for node in model.graph if node.op_type == op_type)


def _first(model: ir.Model, op_type: str, where: Callable[[ir.Node], Any] = bool) -> ir.Node:
    for node in _nodes(model, op_type):
        if where is bool or where(node):
            return node
    raise ArtifactError("a damage finds nothing to damage", got=f"no such {op_type} in the graph")


def _value(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """The array of a constant, or None."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant":
        return producer.attributes["value"].as_tensor().numpy()
    return None


def _number(node: ir.Node, index: int) -> float | None:
    """A scalar constant among a node's inputs."""
    array = _value(node.inputs[index])
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _producer(value: ir.Value | None) -> str | None:
    """The type of the operator that made a value."""
    node = None if value is None else value.producer()
    return None if node is None else node.op_type


def _set(model: ir.Model, node: ir.Node, index: int, array: Any) -> None:
    """Replace one input by a new constant of the same dtype."""
    old = node.inputs[index]
    dtype = None if old is None or old.dtype is None else old.dtype.numpy()
    name = f"damage_{len(model.graph.initializers)}"
    tensor = ir.tensor(np.asarray(array, dtype), name=name)
    value = ir.Value(
        name=name,
        const_value=tensor,
        shape=ir.Shape(tensor.numpy().shape),
        type=ir.TensorType(tensor.dtype),
    )
    model.graph.register_initializer(value)
    node.replace_input_with(index, value)


def _bypass(node: ir.Node, index: int = 0) -> None:
    source = node.inputs[index]
    if source is None:
        raise ArtifactError("a damage finds nothing to damage", got=node.name)
    convenience.replace_all_uses_with(node.outputs[0], source)


def _swap(node: ir.Node, a: int, b: int) -> None:
    first, second = node.inputs[a], node.inputs[b]
    node.replace_input_with(a, second)
    node.replace_input_with(b, first)


def _in_half(op_type: str, where: Callable[[ir.Node], Any] = bool) -> Callable[[ir.Model], None]:
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


def _attribute(op_type: str, attribute: ir.Attr) -> Callable[[ir.Model], None]:
    def apply(model: ir.Model) -> None:
        _first(model, op_type).attributes[attribute.name] = attribute

    return apply


def _no_softcap(model: ir.Model) -> None:
    _bypass(_first(model, "Tanh"))


def _other_cap(model: ir.Model) -> None:
    """cap tanh(S / (cap sqrt(d_head))) with a cap of 62.5: both constants change."""
    tanh = _first(model, "Tanh")
    divide = tanh.inputs[0].producer() if tanh.inputs[0] is not None else None
    (multiply, index), *_ = tanh.outputs[0].uses()
    if divide is None:
        raise ArtifactError("a damage finds nothing to damage", got="no product before the Tanh")
    _set(model, divide, 1, 1.25 * _value_of(divide, 1))
    _set(model, multiply, 1 - index, 1.25 * _value_of(multiply, 1 - index))


def _cap_without_scale(model: ir.Model) -> None:
    """cap tanh(S / cap): the division by sqrt(d_head) is forgotten."""
    divide = _first(
        model, "Div", lambda n: any(u.op_type == "Tanh" for u, _ in n.outputs[0].uses())
    )
    _set(model, divide, 1, 0.125 * _value_of(divide, 1))


def _value_of(node: ir.Node, index: int) -> np.ndarray[Any, Any]:
    array = _value(node.inputs[index])
    if array is None:
        raise ArtifactError("a damage finds nothing to damage", got=f"no constant in {node.name}")
    return array


def _swapped_keys(model: ir.Model) -> None:
    """k = [k_a ; k_b] in place of [k_b ; k_a]; the values stay as they are."""
    concat = _first(
        model, "Concat", lambda node: all(_producer(value) == "Split" for value in node.inputs)
    )
    _swap(concat, 0, 1)


def _no_residual_scale(model: ir.Model) -> None:
    """(1 + s) x becomes x."""

    def scales(node: ir.Node) -> bool:
        number = [_number(node, i) for i in (0, 1)]
        feeds = {user.op_type for user, _ in node.outputs[0].uses()}
        return number.count(None) == 1 and feeds == {"Add"}

    node = _first(model, "Mul", scales)
    _bypass(node, 0 if _number(node, 0) is None else 1)


def _no_query_norm(model: ir.Model) -> None:
    """The root mean square of q is no longer divided by: the gain is the d_head long one."""

    def of_heads(node: ir.Node) -> bool:
        gains = [_value(v) for user, _ in node.outputs[0].uses() for v in user.inputs]
        heads = any(g is not None and g.ndim == 1 and 1 < g.size <= 64 for g in gains)
        return heads and _producer(node.inputs[1]) == "Clip"

    _bypass(_first(model, "Div", of_heads))


def _other_rms_eps(model: ir.Model) -> None:
    clip = _first(model, "Clip")
    _set(model, clip, 1, 1000 * _value_of(clip, 1))


def _roll(fragment: str) -> Callable[[ir.Model], None]:
    """Shift a table by one row."""

    def apply(model: ir.Model) -> None:
        _change_weight(model, fragment, lambda array: np.roll(array, 1, axis=0))

    return apply


def _change_weight(model: ir.Model, fragment: str, change: Callable[[Any], Any]) -> None:
    for name, value in model.graph.initializers.items():
        if fragment in name and value.const_value is not None:
            array = np.asarray(change(value.const_value.numpy()), value.const_value.numpy().dtype)
            value.const_value = ir.tensor(array, name=name)
            return
    raise ArtifactError("a damage finds nothing to damage", got=f"no weight named {fragment}")


def _scaled_weight(model: ir.Model) -> None:
    """One matrix is a part in a hundred too large: a stale or wrongly converted weight."""
    node = _first(model, "MatMul", lambda n: _value(n.inputs[1]) is not None)
    _set(model, node, 1, 1.01 * _value_of(node, 1).astype(np.float32))


def _swapped_inputs(model: ir.Model) -> None:
    """[x0_prev ; x_t] in place of [x_t ; x0_prev]."""
    names = {value.name for value in model.graph.inputs}
    _swap(_first(model, "Concat", lambda n: {v.name for v in n.inputs if v} <= names), 0, 1)


def _swapped_modulation(model: ir.Model) -> None:
    """The shift in the place of the scale of the first modulation."""
    split = _first(model, "Split", lambda n: len(n.outputs) == 6)
    shift, scale = split.outputs[0], split.outputs[1]
    uses = [(value, list(value.uses())) for value in (shift, scale)]
    for (_, users), other in zip(uses, (scale, shift), strict=True):
        for user, index in users:
            user.replace_input_with(index, other)


def _no_rotation(model: ir.Model) -> None:
    """(-x2, x1) becomes (x2, x1): half of the rotary rotation has the wrong sign."""
    _bypass(_first(model, "Neg"))


def _no_gate(model: ir.Model) -> None:
    """SiLU(x) becomes x in the first gated MLP."""
    sigmoid = _first(model, "Sigmoid")
    (multiply, index), *_ = sigmoid.outputs[0].uses()
    _bypass(multiply, 1 - index)


def _argmin(model: ir.Model) -> None:
    _first(model, "ArgMax").op_type = "ArgMin"


def _joins_stream(node: ir.Node) -> bool:
    """A residual sum: no constant operand, and what it makes is read by a norm."""
    readers = {user.op_type for user, _ in node.outputs[0].uses()}
    return all(_value(v) is None for v in node.inputs) and "LayerNormalization" in readers


_SCALE = ir.AttrFloat32("scale", 0.2)
_CAUSAL = ir.AttrInt64("is_causal", 1)
_EPS = ir.AttrFloat32("epsilon", 1e-3)
_TANH_GELU = ir.AttrString("approximate", "tanh")

DAMAGES: tuple[Damage, ...] = (
    Damage("softcap removed", LATENTS, _no_softcap),
    Damage("cap changed", LATENTS, _other_cap),
    Damage("softcap without the scale", LATENTS, _cap_without_scale),
    Damage("keys swapped", LATENTS, _swapped_keys),
    Damage("residual scale dropped", LATENTS, _no_residual_scale),
    Damage("query norm dropped", LATENTS, _no_query_norm),
    Damage("GELU approximated", LATENTS, _attribute("Gelu", _TANH_GELU)),
    Damage("position table shifted", LATENTS, _roll("positions")),
    Damage("LayerNorm eps changed", LATENTS, _attribute("LayerNormalization", _EPS)),
    Damage("RMSNorm eps changed", LATENTS, _other_rms_eps),
    Damage("LayerNorm in half", LATENTS, _in_half("LayerNormalization")),
    Damage("RMSNorm in half", LATENTS, _in_half("ReduceL2")),
    Damage("softcap in half", LATENTS, _in_half("Tanh")),
    Damage("softmax in half", LATENTS, _in_half("Softmax")),
    Damage("residual in half", LATENTS, _in_half("Add", _joins_stream)),
    Damage("latent mean and std lost", LATENTS, lambda model: _bypass(_first(
        model, "Mul", lambda n: model.graph.inputs[0] in n.inputs))),
    Damage("a weight scaled", LATENTS, _scaled_weight),
    Damage("GELU exact", DENOISER, _attribute("Gelu", ir.AttrString("approximate", "none"))),
    Damage("x_t and x0_prev swapped", DENOISER, _swapped_inputs),
    Damage("shift and scale swapped", DENOISER, _swapped_modulation),
    Damage("rotation's sign lost", DENOISER, _no_rotation),
    Damage("attention scale changed", DENOISER, _attribute("Attention", _SCALE)),
    Damage("attention made causal", DENOISER, _attribute("Attention", _CAUSAL)),
    Damage("LayerNorm eps changed", DENOISER, _attribute("LayerNormalization", _EPS)),
    Damage("LayerNorm in half", DENOISER, _in_half("LayerNormalization")),
    Damage("time embedding in half", DENOISER, _in_half("Cos")),
    Damage("residual in half", DENOISER, _in_half("Add", _joins_stream)),
    Damage("rotary table shifted", DENOISER, _roll("rotary.cos")),
    Damage("a weight scaled", DENOISER, _scaled_weight),
    Damage("SiLU dropped", LOGITS, _no_gate),
    Damage("rotation's sign lost", LOGITS, _no_rotation),
    Damage("LayerNorm eps changed", LOGITS, _attribute("LayerNormalization", _EPS)),
    Damage("LayerNorm in half", LOGITS, _in_half("LayerNormalization")),
    Damage("residual in half", LOGITS, _in_half("Add", _joins_stream)),
    Damage("a weight scaled", LOGITS, _scaled_weight),
    Damage("argmin in place of argmax", IDS, _argmin),
)  # fmt: skip
