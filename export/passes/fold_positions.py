"""What depends on the position alone, computed once: the decoder's r_0 and more.

A latent decoder's first state is the same for every sample, and so is everything in its first
block that reads it alone: queries, and the state's keys and values (seed S4: nothing in r_0 depends
on the input). A graph holds them for every position; a run reads the first T.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from export.passes._constants import Float32s, constant
from ldlm.errors import GraphCheckError

FLOAT = ir.DataType.FLOAT

# These broadcast over the batch; others are given one copy per sample.
BROADCASTING = ("Add", "Mul", "Sub", "Div", "MatMul")


def fold_positions(model: ir.Model, n_positions: int) -> int:
    """Replace what depends on no input, but on the length, by a constant and a Slice.

    Does not fire on values that are not float32, or that a longer text would change.

    Args:
        model: a graph with one input [batch, length, d].
        n_positions: the largest length.

    Returns:
        How many values were replaced.
    """
    graph = model.graph
    (source,) = graph.inputs
    found = _frontier(graph)
    if not found:
        return 0
    whole = _evaluate(model, found, 1, n_positions)
    part = _evaluate(model, found, 2, n_positions // 2)
    tape = Tape()
    length = tape.op("Shape", [source], {"start": 1, "end": 2})
    zero, one = (_integers(tape, [n]) for n in (0, 1))
    fired = 0
    for value, full, half in zip(found, whole, part, strict=True):
        if not _same(full, half, _length_axis(value)):
            continue
        table = constant(graph, full, f"{value.name}.all_positions")
        axis = _integers(tape, [_length_axis(value)])
        sliced = tape.op("Slice", [table, zero, length, axis, one])
        sliced.dtype = FLOAT
        for use in list(value.uses()):
            if use.node.op_type not in BROADCASTING:
                use.node.replace_input_with(use.idx, _per_sample(tape, sliced, source, value))
            else:
                use.node.replace_input_with(use.idx, sliced)
        fired += 1
    graph.insert_before(graph[0], tape.nodes)
    RemoveUnusedNodesPass()(model)
    return fired


def _frontier(graph: ir.Graph) -> list[ir.Value]:
    """Float32 values that depend on the length alone and are read by what depends on the data."""
    data = set(graph.inputs)
    sized: set[ir.Value] = set()
    for node in graph:
        values = [value for value in node.inputs if value is not None]
        if node.op_type != "Shape" and any(value in data for value in values):
            data.update(node.outputs)
        elif node.op_type == "Shape" or any(value in sized for value in values):
            sized.update(node.outputs)
    found: dict[ir.Value, None] = {}
    for node in graph:
        if any(output in data for output in node.outputs):
            found.update(
                (value, None)
                for value in node.inputs
                if value in sized and value.dtype == FLOAT and _is_table(value)
            )
    return list(found)


def _same(full: Float32s, part: Float32s, axis: int) -> bool:
    """Whether a shorter text in a batch of two has the same values, up to rounding.

    If not, positions or samples see one another.
    """
    prefix = np.take(full, range(part.shape[axis]), axis)
    tolerance = 1e-5 * float(np.abs(full).max())
    return np.allclose(np.broadcast_to(prefix, part.shape), part, rtol=1e-4, atol=tolerance)


def _is_table(value: ir.Value) -> bool:
    """[length, ..] that is only added or multiplied, or [batch, .., length, ..]."""
    dims = [] if value.shape is None else list(value.shape)
    per_sample = bool(dims) and isinstance(dims[0], ir.SymbolicDim) and dims[0].value == "batch"
    broadcast = all(use.node.op_type in BROADCASTING for use in value.uses())
    return _length_axis(value) >= 0 and (per_sample or broadcast)


def _integers(tape: Tape, numbers: list[int]) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(numbers, dtype=ir.DataType.INT64)})


def _length_axis(value: ir.Value) -> int:
    dims = [] if value.shape is None else list(value.shape)
    found = [i for i, d in enumerate(dims) if isinstance(d, ir.SymbolicDim) and d.value == "length"]
    return found[0] if len(found) == 1 else -1


def _evaluate(model: ir.Model, values: list[ir.Value], batch: int, length: int) -> list[Float32s]:
    """The values for a batch and a length, computed operator by operator."""
    names = [str(value.name) for value in values]
    part = model.clone()
    made = {str(value.name): value for node in part.graph for value in node.outputs}
    part.graph.outputs[:] = [made[name] for name in names]
    RemoveUnusedNodesPass()(part)
    proto = ir.to_proto(ir.external_data.load_to_model(part))
    width = model.graph.inputs[0].shape
    if width is None or not isinstance(width[-1], int):
        raise GraphCheckError("the input's width is not known", tensor=model.graph.inputs[0].name)
    feed = np.zeros((batch, length, width[-1]), np.float32)
    run = ReferenceEvaluator(proto).run(names, {str(model.graph.inputs[0].name): feed})
    return [np.asarray(array) for array in run]


def _per_sample(tape: Tape, sliced: ir.Value, source: ir.Value, old: ir.Value) -> ir.Value:
    batch = tape.op("Shape", [source], {"start": 0, "end": 1})
    rank = 0 if old.shape is None else len(old.shape)
    size = tape.op("Concat", [batch, _integers(tape, [1] * (rank - 1))], {"axis": 0})
    copies = tape.op("Expand", [sliced, size])
    copies.dtype, copies.shape = FLOAT, old.shape
    return copies
