"""Export: stages and precision policies as data, torch to ONNX, graph passes, graph checks.

The names below load on first use; `export.stages` and `export.precision` import no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export.exporter import export_stage
    from export.precision import POLICIES
    from export.stages import STAGES

__all__ = ["POLICIES", "STAGES", "export_stage"]

_HOMES = {
    "POLICIES": "export.precision",
    "STAGES": "export.stages",
    "export_stage": "export.exporter",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
