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
    whole, part = (_evaluate(model, found, length) for length in (n_positions, n_positions // 2))
    tape = Tape()
    length = tape.op("Shape", [source], {"start": 1, "end": 2})
    zero, one = (tape.initializer(ir.tensor([n], name=f"fold.{n}")) for n in (0, 1))
    fired = 0
    for value, full, half in zip(found, whole, part, strict=True):
        axis = _length_axis(value)
        prefix = np.take(full, range(half.shape[axis]), axis)
        if not np.allclose(prefix, half, rtol=1e-4, atol=1e-5 * float(np.abs(half).max())):
            continue  # positions see one another
        table = constant(graph, full, f"{value.name}.all_positions")
        where = tape.initializer(ir.tensor([axis], name=f"{value.name}.axis"))
        sliced = tape.op("Slice", [table, zero, length, where, one])
        sliced.dtype = FLOAT
        for use in list(value.uses()):
            if use.node.op_type not in BROADCASTING:
                use.node.replace_input_with(use.idx, _per_sample(tape, sliced, source, value))
            else:
                use.node.replace_input_with(use.idx, sliced)
        fired += 1
    for item in tape.initializers:
        graph.register_initializer(item)
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
                if value in sized and value.dtype == FLOAT and _length_axis(value) >= 0
            )
    return list(found)


def _length_axis(value: ir.Value) -> int:
    dims = [] if value.shape is None else list(value.shape)
    found = [i for i, d in enumerate(dims) if isinstance(d, ir.SymbolicDim) and d.value == "length"]
    return found[0] if len(found) == 1 else -1


def _evaluate(model: ir.Model, values: list[ir.Value], length: int) -> list[Float32s]:
    """The values for a batch of one, computed operator by operator."""
    names = [str(value.name) for value in values]
    part = model.clone()
    made = {str(value.name): value for node in part.graph for value in node.outputs}
    part.graph.outputs[:] = [made[name] for name in names]
    RemoveUnusedNodesPass()(part)
    proto = ir.to_proto(ir.external_data.load_to_model(part))
    width = model.graph.inputs[0].shape
    if width is None or not isinstance(width[-1], int):
        raise GraphCheckError("the input's width is not known", tensor=model.graph.inputs[0].name)
    feed = np.zeros((1, length, width[-1]), np.float32)
    run = ReferenceEvaluator(proto).run(names, {str(model.graph.inputs[0].name): feed})
    return [np.asarray(array) for array in run]


def _per_sample(tape: Tape, sliced: ir.Value, source: ir.Value, old: ir.Value) -> ir.Value:
    batch = tape.op("Shape", [source], {"start": 0, "end": 1})
    rank = 0 if old.shape is None else len(old.shape)
    ones = tape.initializer(ir.tensor([1] * (rank - 1), name=f"{old.name}.ones"))
    size = tape.op("Concat", [batch, ones], {"axis": 0})
    copies = tape.op("Expand", [sliced, size])
    copies.dtype, copies.shape = FLOAT, old.shape
    return copies
