"""The primitives of LDLM: norms, softcap, residuals, MLPs, positions.

A computation whose dtype is a decision, not an accident, is an `Island`. It runs in float32
unless a precision policy (export/precision.py) sets its `compute_dtype`; float64 input is left
in float64, so that the whole model can be run as a float64 reference. A `Linear` casts its input
to the dtype of its own weight. Together these two make the dtype of every intermediate explicit,
in eager, under torch.export and under autocast alike.
"""

import contextlib
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Module(nn.Module):
    """A torch module that returns a tensor, for the type checker."""

    __call__: Callable[..., Tensor]


NormalizedShape = int | list[int] | tuple[int, ...] | torch.Size


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off for x's device; does nothing, and traces to nothing, when it is off."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


class Island(Module):
    """A computation that keeps a dtype of its own, whatever the dtype around it.

    Attributes:
        kind: the name by which precision rules address this computation.
        compute_dtype: the dtype it runs in; its result has that dtype.
    """

    kind: ClassVar[str]
    compute_dtype: torch.dtype = torch.float32

    def enter(self, x: Tensor) -> Tensor:
        """Cast x to the dtype this island computes in. float64 stays float64."""
        return x if x.dtype == torch.float64 else x.to(self.compute_dtype)


class Linear(nn.Linear):
    """y = x W^T + b in the dtype of W: the input is cast to it. [.., in] -> [.., out]."""

    kind: ClassVar[str] = "linear"
    __call__: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(self.weight.dtype), self.weight, self.bias)


class BiaslessLayerNorm(Island):
    """y = gamma * (x - mean) / sqrt(var + eps) over the last dimensions; no bias (S0, S2).

    The variance is the biased one. Computed in float32 with autocast off, and the result stays
    float32, so the modulation that multiplies it runs in float32 too (S0: the float32 island).

    Args:
        normalized_shape: an int, list, tuple or torch.Size; x ends in these dimensions.
        eps: added to the variance (S0: 1e-5).
        device, dtype: of the gain, as for torch modules.

    Shape: [.., *normalized_shape] of any float dtype -> the same shape, float32 (or float64).
    """

    kind: ClassVar[str] = "layer_norm"
    bias: Tensor | None

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (
            [normalized_shape]
            if isinstance(normalized_shape, (int, np.integer))
            else normalized_shape
        )
        self.normalized_shape = tuple(int(size) for size in sizes)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with no_autocast(x):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(BiaslessLayerNorm):
    """y = gamma * (x - mean) / sqrt(var + eps) + beta (S4: the norm inside the MLP)."""

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, device, dtype)
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape, device=device, dtype=dtype))


class RMSNorm(Island):
    """y = gamma * x / max(||x||_2 / sqrt(n), eps) over the last dimension (S4).

    The eps bounds the root mean square from below; it is not a sum under the root.

    Shape: [.., n] of any float dtype -> [.., n], float32 (or float64).
    """

    kind: ClassVar[str] = "rms_norm"

    def __init__(self, n: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.n = n
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with no_autocast(x):
            rms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * self.n**-0.5
            return self.gain.to(x.dtype) * (x / rms.clamp(min=self.eps))

    def extra_repr(self) -> str:
        return f"{self.n}, eps={self.eps}"


def softcap(scores: Tensor, cap: float, d_head: int) -> Tensor:
    """F = cap * tanh(S / (cap * sqrt(d_head))), on the raw scores, before the softmax (S4)."""
    return cap * torch.tanh(scores / (cap * d_head**0.5))


class Softcap(Module):
    """`softcap` with its constants, as a module: F has a name, like every other intermediate."""

    def __init__(self, cap: float, d_head: int) -> None:
        super().__init__()
        self.cap = cap
        self.d_head = d_head

    def forward(self, scores: Tensor) -> Tensor:
        return softcap(scores, self.cap, self.d_head)


class Residual(Island):
    """x <- x + update, or x + gate * update: the stream that every block adds to.

    Shape: stream [B, T, d], update [B, T, d], gate [B, 1, d] -> [B, T, d].
    """

    kind: ClassVar[str] = "residual"

    def forward(self, stream: Tensor, update: Tensor, gate: Tensor | None = None) -> Tensor:
        update = self.enter(update)
        if gate is not None:
            update = self.enter(gate) * update
        return self.enter(stream) + update


class ResidualScale(Island):
    """(1 + s) * x with one learned s for masked and one for unmasked positions (S4).

    Both start at 0. The product belongs to the residual stream and has its dtype.

    Shape: x [.., T, d], masked [.., T] bool or None (every position is masked) -> [.., T, d].
    """

    kind: ClassVar[str] = "residual"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))  # (masked, unmasked)

    def forward(self, x: Tensor, masked: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        scale = self.scale.to(x.dtype)
        if masked is None:
            return (1 + scale[0]) * x
        return (1 + torch.where(masked[..., None], scale[0], scale[1])) * x


class NormedMLP(Module):
    """Delta = W2 GELU(W1 LayerNorm(x) + b1) + b2 with the exact GELU, h * Phi(h) (S4).

    Shape: [.., d] -> [.., d].
    """

    def __init__(self, d: int, d_mlp: int, eps: float) -> None:
        super().__init__()
        self.norm = LayerNorm(d, eps)
        self.up = Linear(d, d_mlp)
        self.down = Linear(d_mlp, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return self.down(F.gelu(h))


class Rotary(nn.Module):
    """Tables of the rotary position embedding, rotate-half form (lineage).

    Angles are position * base^(-i / (d_head / 2)). They are computed in float64, and cos and sin
    are kept in float32, so that every runtime reads the same constants.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, d_head: int, n_positions: int, base: float) -> None:
        super().__init__()
        half = d_head // 2
        frequencies = base ** (-np.arange(half) / half)
        angles = np.outer(np.arange(n_positions), np.concatenate([frequencies, frequencies]))
        for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            tensor = torch.from_numpy(table.astype(np.float32))
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """The tables for positions 0 .. length-1, each [length, d_head]."""
        return self.cos[:length], self.sin[:length]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i + d_head/2}) by their angles. x [B, H, T, d_head]."""
    cos, sin = (table.to(x.dtype) for table in tables)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
