"""The proof's measures of rounding, where a few positions hold most of the error."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from engines.proof.drift import Trace, typical
from engines.proof.gates import CASES
from engines.proof.inputs import clamped
from export.stages import MAX_BATCH
from ldlm import LDLM

SHAPE = (4, 16, 8)  # texts, positions, width
REFERENCE = Trace([np.ones(SHAPE, np.float32) for _ in range(5)], np.zeros((4, 16), np.int64))


def moved(by: float) -> Trace:
    return Trace([x * np.float32(1 + by) for x in REFERENCE.estimates], REFERENCE.tokens)


def test_the_drift_is_that_of_the_loop_and_not_of_one_text() -> None:
    run = moved(1e-3)
    assert typical(run, REFERENCE) == pytest.approx(1e-3, rel=1e-3)
    run.estimates[3][2] = 7.0  # its choice of a token tipped over
    assert typical(run, REFERENCE) == pytest.approx(1e-3, rel=1e-3)
    assert typical(moved(2e-3), REFERENCE) > 1.9 * typical(run, REFERENCE)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_one_value_that_is_not_finite_is_no_drift_at_all(value: float) -> None:
    run = moved(1e-3)
    run.estimates[4][0, 0, 0] = value
    assert typical(run, REFERENCE) == np.inf


@pytest.mark.parametrize("positions", [2, 16, 100, 1024])
def test_a_case_that_is_cut_keeps_its_number_of_positions(small: LDLM, positions: int) -> None:
    config = msgspec.structs.replace(small.config, n_positions=positions)
    for case in CASES:
        batch, length = clamped(case, config)
        assert length == min(case[1], positions)
        assert case[0] <= batch <= MAX_BATCH
        kept, wanted = batch * length, case[0] * case[1]
        assert wanted - length < kept <= wanted or batch == MAX_BATCH
        assert clamped(case, config, largest=3)[0] <= 3
