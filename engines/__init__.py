"""Engines: an artifacts folder as one object, TensorRT builds, runtimes and the proof.

The names below load on first use; importing the package imports neither torch nor onnx.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.api import Artifacts, Sampler, SampleRequest, Samples
    from engines.compile.rtx import build_engine
    from engines.proof.compare import compare
    from engines.runtime.ort import OrtStage
    from engines.runtime.trt_stage import TrtStage

__all__ = [
    "Artifacts", "OrtStage", "SampleRequest", "Sampler", "Samples", "TrtStage", "build_engine",
    "compare",
]  # fmt: skip # rows, as a table

_HOMES = {
    "Artifacts": "engines.api",
    "OrtStage": "engines.runtime.ort",
    "SampleRequest": "engines.api",
    "Sampler": "engines.api",
    "Samples": "engines.api",
    "TrtStage": "engines.runtime.trt_stage",
    "build_engine": "engines.compile.rtx",
    "compare": "engines.proof.compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
