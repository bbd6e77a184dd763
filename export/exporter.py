"""One stage, one precision: torch module -> ONNX files that have passed their checks."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
import torch
from torch import Tensor, nn

from export import checks, precision
from export.passes.argmax_tail import argmax_tail
from export.passes.fold import fold
from export.passes.fuse_rotary import fuse_rotary
from export.passes.solver_update import next_step, solver_update
from export.passes.split_conditioning import conditioning_graph, step_graph
from export.passes.strip_metadata import strip_metadata
from export.stages import (
    DYNAMIC,
    TABLE_STEPS,
    StageSpec,
    compared,
    example_sizes,
    graph_ranges,
    sharing,
    stage,
)
from ldlm import files
from ldlm.errors import ExportError

if TYPE_CHECKING:
    from ldlm.config import LDLMConfig
    from ldlm.model import LDLM

OPSET = 23  # the first with Attention; both runtimes read it


@dataclass(frozen=True)
class ExportedGraph:
    """One ONNX file and what its checks found.

    Attributes:
        spec: the stage.
        path: the .onnx file.
        data: the external data file that it reads.
        evidence: what the checks counted.
    """

    spec: StageSpec
    path: Path
    data: Path
    evidence: checks.Evidence


def export_stage(model: LDLM, name: str, precision_name: str, folder: Path) -> list[ExportedGraph]:
    """Export a stage in a precision; stages that share its weights come with it.

    The files are written to a temporary folder, checked there, and only then moved to `folder`.

    Args:
        model: float32, in eval mode, on the CPU.
        name: a stage of `export.stages.STAGES`.
        precision_name: a policy, see `export.precision.policy`.
        folder: where `<stage>.onnx` and `<stage>.onnx.data` go.

    Returns:
        One entry per ONNX file: the plain graph's, and those that passes make of it.

    Raises:
        ConfigError: no such stage or precision.
        ExportError: the stage cannot be exported, or the file fails a check.
        DiskSpaceError: the disk is full.
    """
    weights = stage(name).weights
    rules = precision.policy(precision_name)
    specs = sharing(weights, precision_name)
    traced = compared(weights)
    module = precision.apply(traced.build(model), weights, rules).eval()
    size = sum(tensor.nbytes for tensor in checks.tensors_of(module).values())
    files.require_space(folder, size * len({spec.data for spec in specs}) + (8 << 20))

    with files.staging_folder(folder) as staging:
        path = staging / f"{traced.name}.onnx"
        _save(trace(module, traced, model.config), path, traced.data)
        evidence: dict[str, checks.Evidence] = {}
        for spec in sorted(specs, key=lambda spec: spec is not traced):  # the plain one first
            target = staging / f"{spec.name}.onnx"
            if spec is not traced:
                _derive(path, target, spec, model.config)
            evidence[spec.name] = checks.check_graph(
                target, spec, model.config, module, rules, OPSET
            )
        checks.check_split(evidence)
        # The old graphs go first and the new ones come last: at no moment does an .onnx file
        # stand beside another's weights.
        for spec in specs:
            (folder / f"{spec.name}.onnx").unlink(missing_ok=True)
        for data in dict.fromkeys(spec.data for spec in specs):
            files.publish(staging / data, folder / data)
        for spec in specs:
            files.publish(staging / f"{spec.name}.onnx", folder / f"{spec.name}.onnx")
    return [
        ExportedGraph(spec, folder / f"{spec.name}.onnx", folder / spec.data, evidence[spec.name])
        for spec in specs
    ]


def example_inputs(spec: StageSpec, config: LDLMConfig) -> tuple[Tensor, ...]:
    """Random inputs for tracing, a tensor of its own for every input.

    The same tensor for two inputs would be merged into one by the exporter.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = example_sizes(config)
    return tuple(
        torch.rand(tensor.shape(config, sizes), generator=generator) for tensor in spec.inputs
    )


def trace(
    module: nn.Module, spec: StageSpec, config: LDLMConfig, extra: Sequence[str] = ()
) -> ir.Model:
    """torch.export with the stage's dynamic axes, then translation to ONNX.

    Args:
        module: the stage's module, a precision policy applied.
        spec, config: its inputs, outputs and sizes.
        extra: names of what the module returns after the stage's outputs; see `export.equations`.

    Raises:
        ExportError: torch cannot export it.
    """
    ranges = graph_ranges(config)
    dims = {axis: torch.export.Dim(axis, min=r.min, max=r.max) for axis, r in ranges.items()}
    dynamic_shapes = tuple(
        {i: dims[str(axis)] for i, axis in enumerate(tensor.axes) if axis in DYNAMIC}
        for tensor in spec.inputs
    )
    try:
        with _quiet(), warnings.catch_warnings(), torch.no_grad():
            # Deprecations inside torch's own exporter; nothing that a user could act on.
            warnings.simplefilter("ignore", (DeprecationWarning, FutureWarning, UserWarning))
            program = torch.onnx.export(
                module,
                example_inputs(spec, config),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=dynamic_shapes,
                input_names=[tensor.name for tensor in spec.inputs],
                output_names=[*(tensor.name for tensor in spec.outputs), *extra],
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise ExportError(
            "torch.onnx could not export the stage", stage=spec.name, got=str(error)[:2000]
        ) from error
    if program is None:
        raise ExportError("torch.onnx returned no program", stage=spec.name)
    strip_metadata(program.model)
    return program.model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the exporter logs in every run: torchvision's absence, folds it skips."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx._internal.exporter", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _save(model: ir.Model, path: Path, data: str | None) -> None:
    with files.disk_errors(path):
        ir.save(model, path, external_data=data)


def _derive(source: Path, target: Path, spec: StageSpec, config: LDLMConfig) -> None:
    """Write a graph that passes make of the plain one, over the same external data.

    A folded one has data of its own.
    """
    model = ir.load(source)
    names = [tensor.name for tensor in (*spec.inputs, *spec.outputs)]
    if spec.name == "token_decoder":
        argmax_tail(model, spec.outputs[0].name)
    elif spec.name == "conditioning":
        conditioning_graph(model, "t", spec.outputs[0].name, TABLE_STEPS)
    elif spec.name == "denoiser_step":
        x, _, _, modulations, coefficients, noise, x_next, _, number = names
        step_graph(model, "t", modulations, TABLE_STEPS)
        fuse_rotary(model)
        solver_update(model, (x, coefficients, noise, x_next), TABLE_STEPS)
        next_step(model, number)
    elif spec.role == "folded":
        idle = [name for name, count in fold(model, config.n_positions).items() if not count]
        if idle:
            raise ExportError("a fold matches nothing", stage=spec.name, got=", ".join(idle))
    else:
        raise ExportError("no pass makes this stage", stage=spec.name)
    _save(model, target, spec.data if spec.role == "folded" else None)
