"""Graphs that the proof makes for itself, and the place where they stand meanwhile."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import onnx_ir as ir

from export.passes.dequantise import dequantise
from export.passes.widen import widen
from ldlm import files


def scratch(parent: Path | None = None) -> AbstractContextManager[Path]:
    """A folder for a while, in `parent` or where the system keeps such.

    Raises:
        DiskSpaceError: the disk is full.
    """
    return files.staging_folder(parent or Path(tempfile.gettempdir()))


def rounding_off(path: Path, target: Path) -> Path:
    """Write a graph with every tensor in float32, its weights keeping their rounded values.

    Raises:
        DiskSpaceError: the disk is full.
    """
    graph = ir.load(path)
    widen(graph)
    dequantise(graph)
    return save_graph(graph, target)


def save_graph(graph: ir.Model, target: Path) -> Path:
    """Write a graph with its weights beside it.

    Raises:
        DiskSpaceError: the disk is full.
    """
    constants = (value.const_value for value in graph.graph.initializers.values())
    files.require_space(target, sum(c.nbytes for c in constants if c is not None) + (1 << 20))
    with files.disk_errors(target):
        ir.save(graph, target, external_data=f"{target.name}.data")
    return target
