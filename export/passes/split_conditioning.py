"""Split a denoiser's graph in two: what depends on the time alone, and the rest.

Within a sampler's loop all samples share one time. What depends on it alone is computed for many
steps at once (`conditioning_graph`), and the graph of one step (`step_graph`) looks its rows up.
There the modulated norm, gamma LN(x) (1 + scale) + shift, is a LayerNormalization whose gain and
bias are rows: gamma goes into the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from export.passes.graph import cast, rule_dtype, width
from export.precision import Precision
from export.stages import StageSpec
from ldlm.errors import GraphCheckError

FLOAT = ir.DataType.FLOAT
TIME = "t"  # the denoiser's input of times


@dataclass(frozen=True)
class Row:
    """A value that depends on the time alone and is used by what does not.

    Attributes:
        value: [batch, 1, d].
        norm: the norm whose gain it is, with the product and the sum that follow, if it is one.
    """

    value: ir.Value
    norm: tuple[ir.Node, ir.Node, ir.Node] | None = None

    @property
    def gain(self) -> ir.Value | None:
        """gamma of the norm."""
        return None if self.norm is None else self.norm[0].inputs[1]


def conditioning_graph(model: ir.Model, spec: StageSpec) -> int:
    """Keep what depends on the time, for several times: [steps, rows, d], float32.

    Args:
        model: the denoiser's graph, changed in place; its input of times is "t".
        spec: with one input [steps], and the output's name.

    Returns:
        The number of rows.

    Raises:
        GraphCheckError: the graph does not split.
    """
    (steps,) = (int(axis) for axis in spec.inputs[0].axes)
    rows = rows_of(model.graph, TIME)
    tape = Tape()
    parts = [_scaled(tape, row) for row in rows]
    stacked = tape.op("Concat", parts, {"axis": 1})
    stacked.name, stacked.dtype = spec.outputs[0].name, FLOAT
    size = width(rows[0].value)
    for node in tape.nodes:
        model.graph.append(node)
    model.graph.outputs[:] = [stacked]
    RemoveUnusedNodesPass()(model)
    for value in [v for v in model.graph.inputs if str(v.name) != TIME]:
        model.graph.inputs.remove(value)
    for value in (*model.graph.inputs, *(v for node in model.graph for v in node.outputs)):
        _fix_batch(value, steps)
    stacked.shape = ir.Shape([steps, len(rows), size])
    return len(rows)


def step_graph(model: ir.Model, spec: StageSpec) -> int:
    """Read what depends on the time from row `step` of a table [steps, rows, d].

    Args:
        model: the denoiser's graph, changed in place; its input of times, "t", is replaced by the
            inputs "step" [1] int64 and "modulations".
        spec: with the input "modulations".

    Returns:
        How many norms took their gain and bias from the table.

    Raises:
        GraphCheckError: the graph does not split.
    """
    graph = model.graph
    steps = int(spec.input("modulations").axes[0])
    rows = rows_of(graph, TIME)
    size = width(rows[0].value)
    number = ir.Value(name="step", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    values = ir.Value(
        name="modulations", shape=ir.Shape([steps, len(rows), size]), type=ir.TensorType(FLOAT)
    )
    tape = Tape()
    row = tape.op("Gather", [values, number], {"axis": 0})
    flat = tape.op("Reshape", [row, tape.initializer(ir.tensor([-1], name="flat_shape"))])
    found = tape.op_multi_out("Split", [flat], {"num_outputs": len(rows)}, num_outputs=len(rows))
    for item in (row, flat, *found):
        item.dtype = FLOAT
    row.shape, flat.shape = ir.Shape([1, len(rows), size]), ir.Shape([len(rows) * size])
    fired = 0
    for old, new in zip(rows, found, strict=True):
        new.shape = ir.Shape([size])
        if old.norm is None:
            old.value.replace_all_uses_with(cast(tape, new, old.value.dtype or FLOAT))
        else:
            fired += 1
    _give_norms(graph, rows, found)
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.insert_before(graph[0], tape.nodes)
    place = next(i for i, value in enumerate(graph.inputs) if str(value.name) == TIME)
    RemoveUnusedNodesPass()(model)
    del graph.inputs[place]
    graph.inputs.extend([number, values])
    return fired


def require_tables(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """Every float32 norm of a step takes its gain and bias from the table.

    Raises:
        GraphCheckError: naming the first that does not.
    """
    if rule_dtype(precision, spec.component, "layer_norm") != FLOAT:
        return
    for node in graph:
        if node.op_type == "LayerNormalization" and len(node.inputs) < 3:
            raise GraphCheckError(
                "a norm does not take its gain and bias from the table",
                stage=spec.name,
                tensor=node.name,
            )


def rows_of(graph: ir.Graph, time: str) -> list[Row]:
    """What of the time the rest of a graph uses, in the order of its first use.

    Raises:
        GraphCheckError: something of another shape than one vector per sample.
    """
    early = _closure(graph, {v for v in graph.inputs if str(v.name) == time})
    late = _closure(graph, {v for v in graph.inputs if str(v.name) != time})
    found: dict[ir.Value, None] = {}
    for node in graph:
        if any(output in late for output in node.outputs):
            found.update(dict.fromkeys(v for v in node.inputs if v in early and v not in late))
    for value in found:
        dims = [] if value.shape is None else list(value.shape)
        if len(dims) != 3 or dims[1] != 1 or value.is_graph_output():
            raise GraphCheckError(
                "what depends on the time is not one vector per sample",
                tensor=value.name,
                expected="[batch, 1, d]",
                got=str(value.shape),
            )
    if not found:
        raise GraphCheckError("nothing of the graph depends on the time", tensor=time)
    if len(widths := {width(value) for value in found}) != 1:
        raise GraphCheckError("the time's vectors have several widths", got=sorted(widths))
    return [Row(value, _norm(value, set(found))) for value in found]


def _closure(graph: ir.Graph, values: set[ir.Value]) -> set[ir.Value]:
    """All values that depend on any of these."""
    reached = set(values)
    for node in graph:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
    return reached


def _norm(value: ir.Value, rows: set[ir.Value]) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """The float32 norm that a row scales, if another row is then added, and no other reader."""
    if value.dtype != FLOAT or len(value.uses()) != 1:
        return None
    ((product, place),) = ((use.node, use.idx) for use in value.uses())
    scaled = product.inputs[1 - place] if product.op_type == "Mul" else None
    norm = None if scaled is None else scaled.producer()
    if norm is None or norm.op_type != "LayerNormalization" or len(norm.inputs) != 2:
        return None
    gain = norm.inputs[1]
    if gain is None or gain.const_value is None or norm.attributes.get_int("axis", -1) != -1:
        return None
    users = [use.node for use in product.outputs[0].uses()]
    inner = (norm.outputs[0], product.outputs[0])
    if any(len(v.uses()) != 1 or v.is_graph_output() for v in inner) or users[0].op_type != "Add":
        return None
    shifts = [v for v in users[0].inputs if v in rows]
    if len(shifts) != 1 or shifts[0] is None or len(shifts[0].uses()) != 1:
        return None
    return norm, product, users[0]


def _scaled(tape: Tape, row: Row) -> ir.Value:
    """The row as the table has it: float32, and gamma (1 + scale) where a norm reads it."""
    value = cast(tape, row.value, FLOAT)
    if row.gain is not None:
        value = tape.op("Mul", [row.gain, value])
        value.dtype = FLOAT
    return value


def _give_norms(graph: ir.Graph, rows: Sequence[Row], found: Sequence[ir.Value]) -> None:
    """LN(x) * row + row becomes one LayerNormalization."""
    for row, gain in zip(rows, found, strict=True):
        if row.norm is None:
            continue
        norm, product, total = row.norm
        bias = next(v for v in total.inputs if v is not None and v is not product.outputs[0])
        new = ir.Node(
            "",
            "LayerNormalization",
            inputs=[norm.inputs[0], gain, bias],
            attributes=list(norm.attributes.values()),
            name=norm.name,
        )
        old = total.outputs[0]
        new.outputs[0].name, new.outputs[0].dtype = str(norm.outputs[0].name), FLOAT
        new.outputs[0].shape = old.shape
        graph.insert_before(norm, new)
        old.replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        for node in (total, product, norm):
            graph.remove(node, safe=True)


def _fix_batch(value: ir.Value, steps: int) -> None:
    if value.shape is not None:
        value.shape = ir.Shape([d if isinstance(d, int) else steps for d in value.shape])
