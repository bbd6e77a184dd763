"""Where the files of an artifacts folder are, by the names that tests know them by."""

from __future__ import annotations

import shutil
from pathlib import Path

from engines.artifacts import folder as folders


def graph_path(folder: Path, precision: str, stage: str) -> Path:
    """The ONNX file of a stage; its weights lie beside it."""
    return folder / folders.load(folder).graph(precision, stage).graph.path


def data_path(folder: Path, precision: str, stage: str) -> Path:
    """The weights file of a stage."""
    return folder / folders.load(folder).graph(precision, stage).data.path


def engine_path(folder: Path, precision: str, stage: str) -> Path:
    """The RTX engine of a stage."""
    entry = folders.load(folder).engine(precision, stage, "rtx")
    assert entry is not None
    return folder / entry.engine.path


def copy_graphs(folder: Path, precision: str, target: Path) -> Path:
    """All graphs of a precision and their weights, side by side in a folder of the test's own."""
    target.mkdir()
    for entry in folders.load(folder).graphs:
        if entry.precision == precision:
            for file in (entry.graph, entry.data):
                shutil.copy(folder / file.path, target)
    return target
