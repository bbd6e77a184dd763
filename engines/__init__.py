"""Engines: TensorRT builds, runtimes, the proof, reports and the command line.

The names below load on first use; importing the package imports neither torch nor onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.compile.rtx import build_engine
    from engines.proof.compare import compare
    from engines.runtime.ort import OrtStage

__all__ = ["OrtStage", "build_engine", "compare"]

_HOMES = {
    "OrtStage": "engines.runtime.ort",
    "build_engine": "engines.compile.rtx",
    "compare": "engines.proof.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
