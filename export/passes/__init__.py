"""Graph passes. Each changes an onnx_ir model in place and returns how often it fired.

`PASSES` has those that make one stage's graph of another's, by the names that `export.stages` uses.
The others serve the proof and the build.
"""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from export.passes.argmax_tail import argmax_tail
from export.passes.fuse_rotary import fuse_rotary, require_rows
from export.passes.solver_update import next_step, solver_update
from export.passes.split_conditioning import conditioning_graph, require_tables, step_graph
from export.precision import Precision
from export.stages import StageSpec


def _nothing(graph: ir.Graph, spec: StageSpec, precision: Precision) -> None:
    """Some passes leave nothing to check that the stage's counts and tensors do not show."""


@dataclass(frozen=True)
class Pass:
    """A pass that helps to make a stage.

    Attributes:
        apply: changes the graph for the stage; how often it fired.
        check: refuses a finished graph in which the pass did not do all of its work.
    """

    apply: Callable[[ir.Model, StageSpec], int]
    check: Callable[[ir.Graph, StageSpec, Precision], None] = _nothing


PASSES: dict[str, Pass] = {
    "argmax_tail": Pass(argmax_tail),
    "conditioning_graph": Pass(conditioning_graph),
    "fuse_rotary": Pass(fuse_rotary, require_rows),
    "next_step": Pass(next_step),
    "solver_update": Pass(solver_update),
    "step_graph": Pass(step_graph, require_tables),
}
