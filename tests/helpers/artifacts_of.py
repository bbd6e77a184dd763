"""Where the files of an artifacts folder are: their manifest says it."""

from __future__ import annotations

from pathlib import Path

from engines.artifacts import folder as folders
from export.stages import stages_of


def graph_of(folder: Path, precision: str, stage: str) -> Path:
    """The .onnx file of a stage; its weights lie beside it."""
    return folder / folders.load(folder).graph(precision, stage).graph.path


def data_of(folder: Path, precision: str, stage: str) -> Path:
    """The weights file that a stage reads."""
    return folder / folders.load(folder).graph(precision, stage).data.path


def graphs_of(folder: Path, precision: str, component: str) -> list[Path]:
    """The .onnx files over one weights file."""
    return [graph_of(folder, precision, spec.name) for spec in stages_of(component)]
