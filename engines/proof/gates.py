"""Every tolerance of the proof, in one table, each with its reason."""

import math

# ||got - reference|| / ||reference|| of two float32 computations of one formula. Twelve blocks of
# float32 rounding in another order stay near 1e-6; a tanh in place of an erf in GELU gives 1e-4.
FORMULA_L2 = 1e-5

# Stress weights amplify rounding: sharp attention turns on differences of large scores. There the
# limit is FORMULA_L2 or this multiple of float32 PyTorch's own distance from float64, whichever is
# larger: two float32 computations, each that far from the truth in its own direction, and a factor
# of two for another order of summation.
FLOAT64_RATIO = 4.0

# A half precision may be this much worse than PyTorch's own autocast in that dtype; int8, than
# PyTorch's own dynamic quantisation of the same layers.
AUTOCAST_RATIO = 1.25

# However bad PyTorch's own error is: past this relative L2 an output has more error than half its
# length, and a precision that gives it is of no use. Integers come to it on outliers.
SIGNAL_LOST = 0.5


def precision_limit(error: float) -> float:
    """How far a precision may be from float32, by the relative L2 of PyTorch's own error.

    A measure that overflows is none: the limit is then what it is, and no line passes.
    """
    return min(AUTOCAST_RATIO * error, SIGNAL_LOST) if math.isfinite(error) else error


# Two computations that round in different places, each within AUTOCAST_RATIO, are at most this far
# apart in units of PyTorch's own error: independent errors add in squares.
AGREEMENT_RATIO = 2**0.5 * AUTOCAST_RATIO

# The KL divergence of two softmaxes grows with the square of the logits' error.
KL_RATIO = AUTOCAST_RATIO**2

# Where the reference's best logit and the chosen one are closer than this, the choice is a
# near-tie: in float32 as a share of the logits' root mean square, in a half precision as a
# multiple of the largest difference that autocast makes to a logit; in int8, dynamic quantisation.
NEAR_TIE_FLOAT32 = 1e-4
NEAR_TIE_HALF = 2 * AUTOCAST_RATIO

# A sampler's estimates over its steps, against float32 PyTorch on the same noise. Float32 runtimes
# add their rounding at each step; the loop must not amplify it.
DRIFT_FLOAT32 = 1e-4

# An intermediate stands out when its error is this many times that of every one before it. A
# softmax of large scores multiplies rounding by 4; another formula or a swap gives 1e-2 and more.
STANDS_OUT = 10.0

# (batch, length) of the proof: none is the export example, the smallest and uneven ones included.
CASES: tuple[tuple[int, int], ...] = ((1, 1), (1, 17), (1, 128), (3, 1), (3, 17), (3, 128))
