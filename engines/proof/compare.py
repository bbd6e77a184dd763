"""How far one array is from another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import StageInputError


@dataclass(frozen=True)
class Comparison:
    """Distances of an array from its reference, computed in float64.

    Attributes:
        max_abs: largest absolute difference.
        p99_abs: the 99th percentile of the absolute differences.
        relative_l2: ||got - reference|| / ||reference||.
        cosine: cosine of the angle between the two.
        non_finite: values of `got` that are NaN or infinite; with any, the distances are infinite
            and the cosine is 0.
        size: number of values.
    """

    max_abs: float
    p99_abs: float
    relative_l2: float
    cosine: float
    non_finite: int
    size: int


def compare(got: NDArray[Any], reference: NDArray[Any]) -> Comparison:
    """Measure the distance between two arrays of one shape.

    Raises:
        StageInputError: the shapes differ, the arrays are empty, or the reference is not finite.
    """
    if got.shape != reference.shape or got.size == 0:
        raise StageInputError(
            "the arrays cannot be compared", expected=list(reference.shape), got=list(got.shape)
        )
    a, b = got.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    if not np.all(np.isfinite(b)):
        raise StageInputError("the reference is not finite", got="NaN or infinity in it")
    non_finite = int(np.count_nonzero(~np.isfinite(a)))
    if non_finite:
        return Comparison(np.inf, np.inf, np.inf, 0.0, non_finite, a.size)
    difference = np.abs(a - b)
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    distance = float(np.linalg.norm(difference))
    rank = min(a.size - 1, int(np.ceil(0.99 * a.size)) - 1)
    p99 = float(np.partition(difference, rank)[rank])
    return Comparison(
        max_abs=float(difference.max()),
        p99_abs=p99,
        relative_l2=distance / norm_b if norm_b else (np.inf if distance else 0.0),
        cosine=float(a @ b) / (norm_a * norm_b) if norm_a and norm_b else float(norm_a == norm_b),
        non_finite=0,
        size=a.size,
    )
