"""Let the denoiser's step end in the solver's update, and in the number of the next step."""

import onnx_ir as ir
from onnx_ir.tape import Tape

from export.stages import StageSpec

FLOAT = ir.DataType.FLOAT


def solver_update(model: ir.Model, spec: StageSpec) -> int:
    """Append x_next = A x + B x0_hat + C eps, float32, in this order.

    A, B and C are row `step` of a table [steps, 3].

    Args:
        model: a step's graph, its first input the state, its one output x0_hat.
        spec: with the inputs "x", "coefficients" [steps, 3] and "noise", and the result first
            among its outputs.

    Returns:
        1, the updates appended.
    """
    graph = model.graph
    x, x0_hat = graph.inputs[0], graph.outputs[0]
    x.name = "x"
    number = next(value for value in graph.inputs if value.name == "step")
    rows = spec.input("coefficients").axes
    table = ir.Value(name="coefficients", shape=ir.Shape(rows), type=ir.TensorType(FLOAT))
    eps = ir.Value(name="noise", shape=x.shape, type=ir.TensorType(FLOAT))
    graph.inputs.extend([table, eps])

    tape = Tape()
    row = tape.op("Gather", [table, number], {"axis": 0})
    A, B, C = tape.op_multi_out("Split", [row], {"axis": 1, "num_outputs": 3}, num_outputs=3)
    mean = tape.op("Add", [tape.op("Mul", [A, x]), tape.op("Mul", [B, x0_hat])])
    x_next = tape.op("Add", [mean, tape.op("Mul", [C, eps])])
    for node in tape.nodes:
        for value in node.outputs:
            value.dtype = FLOAT
        graph.append(node)
    x_next.name, x_next.shape = spec.outputs[0].name, x.shape
    graph.outputs.insert(0, x_next)
    return 1


def next_step(model: ir.Model, spec: StageSpec) -> int:
    """Append step + 1, so that a loop's counter stays where the loop runs.

    Args:
        model: a step's graph, with an input "step" [1] int64.
        spec: names the new output, its last.

    Returns:
        1, the counters appended.
    """
    graph = model.graph
    number = next(value for value in graph.inputs if value.name == "step")
    tape = Tape()
    total = tape.op("Add", [number, tape.initializer(ir.tensor([1], name="one_step"))])
    total.name, total.shape, total.dtype = spec.outputs[-1].name, number.shape, ir.DataType.INT64
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.extend(tape.nodes)
    graph.outputs.append(total)
    return 1
