"""Integer products: weights quantised once per output channel, activations at every call.

    x ~ s_x (q_x - z_x)   q_x uint8; s_x and z_x from the smallest and largest element of x
    W ~ s_w q_w           q_w int8, symmetric, one s_w per output channel
    x W = s_x s_w (q_x - z_x) q_w,  the sum exact in int32

The definition of q_x, s_x and z_x is that of ONNX's DynamicQuantizeLinear.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Weights have 7 bits: a CPU without VNNI adds two products of uint8 and int8 in 16 bits, where
# 255 * 127 * 2 saturates without a word, and 255 * 63 * 2 does not.
LEVELS = 63


class QuantisedLinear(nn.Module):
    """y = x W + b with the product in integers. [.., in] float32 -> [.., out] float32.

    Its scale s_x is one for the whole of x: with several samples in x, each result depends on all.

    Args:
        linear: the float32 layer.

    Attributes:
        codes: q_w [in, out] int8.
        scales: s_w [out] float32; 1 for a channel of zeros.
        rounds: whether the activations are quantised; without, the weights alone are.
    """

    kind: ClassVar[str] = "linear"
    __call__: Callable[..., Tensor]
    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().T
        largest = weight.abs().amax(dim=0)
        scales = torch.where(largest > 0, largest / LEVELS, torch.ones_like(largest))
        self.register_buffer("codes", torch.round(weight / scales).to(torch.int8).contiguous())
        self.register_buffer("scales", scales)
        self.bias = linear.bias
        self.rounds = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.rounds:
            return F.linear(x, (self.codes.to(x.dtype) * self.scales).T, self.bias)
        product, s_x = self._exported(x) if torch.compiler.is_exporting() else self._computed(x)
        y = product.float() * (s_x * self.scales)
        return y if self.bias is None else y + self.bias

    def _exported(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(q_x - z_x) q_w [.., out] int32 and s_x [] float32, as ONNX operators."""
        q_x, s_x, z_x = torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear",
            (x,),
            dtypes=(torch.uint8, torch.float32, torch.uint8),
            shapes=(x.shape, (), ()),
        )
        shape = (*x.shape[:-1], self.codes.shape[1])
        inputs = (q_x, self.codes, z_x)
        return torch.onnx.ops.symbolic("MatMulInteger", inputs, dtype=torch.int32, shape=shape), s_x

    def _computed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same in PyTorch, the sums in float64, which holds every int32 exactly."""
        low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
        s_x = (high - low) / 255
        s_x = torch.where(s_x > 0, s_x, torch.ones_like(s_x))
        z_x = torch.round(-low / s_x).clamp(0, 255)
        q_x = (torch.round(x / s_x) + z_x).clamp(0, 255)
        return (q_x - z_x).double() @ self.codes.double(), s_x
