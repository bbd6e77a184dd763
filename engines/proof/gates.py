"""Every tolerance of the proof, in one table, with its reason."""

from __future__ import annotations

# ||got - reference|| / ||reference|| of two float32 computations of one formula. Twelve blocks of
# float32 rounding in another order stay near 1e-6; a tanh in place of an erf in GELU gives 1e-4.
FORMULA_L2 = 1e-5

# A half precision may be this much worse than PyTorch's own autocast in that dtype.
AUTOCAST_RATIO = 1.25

# Two runtimes may choose different tokens only where the reference's logits are this close,
# as a multiple of the largest difference between their logits.
NEAR_TIE = 2.0

# (batch, length) of the proof: none is the export example, the smallest and uneven ones included.
CASES: tuple[tuple[int, int], ...] = ((1, 1), (1, 17), (1, 128), (3, 1), (3, 17), (3, 128))
