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

from export import checks
from export.passes import PASSES
from export.passes.strip_metadata import strip_metadata
from export.precision import Precision, apply
from export.stages import (
    DYNAMIC,
    StageSpec,
    compared,
    example_sizes,
    graph_ranges,
    stage,
    stages_of,
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


def export_stage(
    model: LDLM, name: str, precision: str | Precision, folder: Path
) -> list[ExportedGraph]:
    """Export a stage in a precision; stages that share its weights come with it.

    The files are written to a temporary folder, checked there, and only then moved to `folder`.

    Args:
        model: float32, in eval mode, on the CPU.
        name: a stage of `export.stages.STAGES`.
        precision: see `export.precision.Precision.of`.
        folder: where `<stage>.onnx` and `<component>.onnx.data` go.

    Returns:
        One entry per ONNX file: the traced graph's, and those that passes make of it.

    Raises:
        ConfigError: no such stage or precision.
        ExportError: the stage cannot be exported, or the file fails a check.
        DiskSpaceError: the disk is full.
    """
    precision = Precision.of(precision)
    component = stage(name).component
    specs, traced = stages_of(component), compared(component)
    module = apply(traced.torch(model), component, precision).eval()
    require_own_names(module, traced)
    size = sum(tensor.nbytes for tensor in checks.tensors_of(module).values())
    files.require_space(folder, size + (8 << 20))

    with files.staging_folder(folder) as staging:
        path = staging / f"{traced.name}.onnx"
        _save(trace(module, traced, model.config), path, traced.data)
        evidence: dict[str, checks.Evidence] = {}
        for spec in sorted(specs, key=lambda spec: not spec.traced):  # the traced one first
            target = staging / f"{spec.name}.onnx"
            if not spec.traced:
                _derive(path, target, spec)
            evidence[spec.name] = checks.check_graph(
                target, spec, model.config, module, precision, OPSET
            )
        checks.check_shares(component, evidence)
        _publish(staging, folder, [f"{spec.name}.onnx" for spec in specs], traced.data)
    return [
        ExportedGraph(spec, folder / f"{spec.name}.onnx", folder / spec.data, evidence[spec.name])
        for spec in specs
    ]


def _publish(staging: Path, folder: Path, graphs: Sequence[str], data: str) -> None:
    """Let graphs and their weights take the place of older ones.

    The old graphs go first and the new ones come last: at no moment does an .onnx file stand beside
    another's weights.
    """
    for name in graphs:
        (folder / name).unlink(missing_ok=True)
    for name in (data, *graphs):
        files.publish(staging / name, folder / name)


def require_own_names(module: nn.Module, spec: StageSpec) -> None:
    """Refuse an input or output with the name of a parameter: in ONNX the two would be one value.

    Raises:
        ExportError: naming it.
    """
    names = {tensor.name for tensor in (*spec.inputs, *spec.outputs)}
    taken = sorted(names & checks.tensors_of(module).keys())
    if taken:
        raise ExportError(
            "an input or output has the name of a parameter of its module",
            stage=spec.name,
            tensor=taken[0],
            remedy="give the TensorSpec another name",
        )


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


def _derive(source: Path, target: Path, spec: StageSpec) -> None:
    """Write the graph that a stage's passes make of the traced one, over the same data."""
    model = ir.load(source)
    for name in spec.passes:
        PASSES[name].apply(model, spec)
    _save(model, target, None)
