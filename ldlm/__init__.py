"""LDLM: the model, its schedule, solvers, sampler, checkpoints and tokenizer.

The names below load on first use, so that importing the package imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ldlm.config import PRESETS, LDLMConfig
    from ldlm.model import LDLM

__all__ = ["LDLM", "PRESETS", "LDLMConfig"]

_HOMES = {"LDLM": "ldlm.model", "LDLMConfig": "ldlm.config", "PRESETS": "ldlm.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
