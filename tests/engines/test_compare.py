"""Distances between arrays."""

from __future__ import annotations

import numpy as np
import pytest

from engines import compare
from ldlm.errors import StageInputError


def test_distances_by_hand() -> None:
    reference = np.array([3.0, 4.0, 0.0, 0.0], np.float32)
    got = reference + np.array([0.0, 0.0, 0.5, 0.0], np.float32)
    found = compare(got, reference)
    assert found.max_abs == 0.5
    assert found.p99_abs == 0.5
    assert found.relative_l2 == pytest.approx(0.1)
    assert found.cosine == pytest.approx(25 / (5 * np.sqrt(25.25)))
    assert (found.non_finite, found.size) == (0, 4)


def test_p99_passes_over_one_outlier_in_a_thousand() -> None:
    reference = np.ones(1000, np.float32)
    got = reference.copy()
    got[7] = 100.0
    assert compare(got, reference).max_abs == 99.0
    assert compare(got, reference).p99_abs == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_value_makes_every_distance_infinite(bad: float) -> None:
    reference = np.ones(10, np.float32)
    got = reference.copy()
    got[3] = bad
    found = compare(got, reference)
    assert found.non_finite == 1
    assert found.relative_l2 == found.max_abs == np.inf
    assert found.cosine == 0.0


def test_zeros() -> None:
    zeros = np.zeros(4, np.float32)
    assert compare(zeros, zeros).relative_l2 == 0.0
    assert compare(zeros + 1, zeros).relative_l2 == np.inf


def test_half_is_compared_in_float64() -> None:
    big = np.full(4, 60000, np.float16)
    assert compare(big, big).relative_l2 == 0.0


def test_what_cannot_be_compared() -> None:
    ones = np.ones(3, np.float32)
    for got, reference in ((np.ones(4), ones), (np.ones(0), np.ones(0)), (ones, ones * np.nan)):
        with pytest.raises(StageInputError):
            compare(got, reference)
