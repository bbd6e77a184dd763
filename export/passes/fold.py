"""Every fold of a decoder's constants, in their order."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from export.passes.fold_gains import fold_gains, fold_key_gains
from export.passes.fold_positions import fold_positions
from export.passes.fold_scales import fold_scales
from export.passes.fold_softcap import fold_softcap


def folds(n_positions: int) -> dict[str, Callable[[ir.Model], int]]:
    """The folding passes by name; what depends on the position takes in the others' results."""
    return {
        "norm gains": fold_gains,
        "key gains": fold_key_gains,
        "softcap scale": fold_softcap,
        "residual scales": fold_scales,
        "positions": lambda model: fold_positions(model, n_positions),
    }


def fold(model: ir.Model, n_positions: int) -> dict[str, int]:
    """Apply all of them; how often each fired."""
    return {name: apply(model) for name, apply in folds(n_positions).items()}
