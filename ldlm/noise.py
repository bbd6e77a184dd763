"""The noise of a sample, defined once for every runtime. NumPy only."""

import numpy as np
from numpy.typing import NDArray

from ldlm.errors import SamplerError

Float32s = NDArray[np.float32]


class NoiseStream:
    """Standard normals for a batch of samples, each from its own generator.

    Sample k of a run with seed s reads Philox(key=[s, k]): first x_1, then one eps per step. A
    text therefore depends on its seed and index alone, never on the batch that it shares.

    Args:
        seed: 0 <= seed < 2^64.
        indices: the samples' indices k in the run.
        shape: (T, d) of one sample.
    """

    def __init__(self, seed: int, indices: range, shape: tuple[int, int]) -> None:
        if not 0 <= seed < 2**64:
            raise SamplerError("the seed is out of range", expected="0 <= seed < 2^64", got=seed)
        # An explicit uint64 array: a list would go through float64 and let large seeds collide.
        self._generators = [
            np.random.Generator(np.random.Philox(key=np.array([seed, k], np.uint64)))
            for k in indices
        ]
        self._shape = shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, d) of every draw."""
        return (len(self._generators), *self._shape)

    def draw(self, out: Float32s | None = None) -> Float32s:
        """The next standard normals, [B, T, d] float32; into `out`, where it is given."""
        batch = np.empty(self.shape, np.float32) if out is None else out
        for sample, generator in zip(batch, self._generators, strict=True):
            generator.standard_normal(dtype=np.float32, out=sample)
        return batch
