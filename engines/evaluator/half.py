"""Half-precision matrix products on the CPU, as a GPU computes them.

PyTorch's own fp16 products are 50 times slower than float32 ones on a CPU. Under this mode a
product reads half inputs, multiplies and accumulates in float32 as tensor cores do, and rounds
its result to half. Everything between the products is left to PyTorch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS: set[Callable[..., Any]] = {
    F.linear,
    F.scaled_dot_product_attention,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
}


class HalfProducts(TorchFunctionMode):
    """Round the products of half tensors as a GPU does.

    Args:
        autocast: None for a module that has its precision applied: only its half tensors count.
            A dtype for a float32 module: every product's inputs are cast to it first, as CUDA's
            autocast does (linear, matmul and attention in half; norms, softmax and sums are in
            float32 by themselves).

    Attributes:
        products: how many products were rounded.
    """

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.autocast = autocast
        self.products = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            dtype = self.autocast or tensors[0].dtype
            if self.autocast or all(t.dtype in (torch.float16, torch.bfloat16) for t in tensors):
                self.products += 1
                wide = [a.to(dtype).float() if isinstance(a, Tensor) else a for a in args]
                if func is F.scaled_dot_product_attention:
                    q, k, v = wide
                    return fused_attention(q, k, v, q.shape[-1] ** -0.5, dtype)
                return func(*wide, **kwargs).to(dtype)
        return func(*args, **kwargs)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """softmax(Q K^T scale) V as a device's fused kernel computes it.

    Scores and softmax stay in float32; the probabilities are rounded to `dtype` before the second
    product reads them, and the result is.

    Args:
        q, k, v: [B, H, T, d_head] float32, holding values of `dtype`.
        scale: of the scores.
        dtype: the half dtype of the kernel.
    """
    scores = (q @ k.transpose(-2, -1)) * scale
    probabilities = torch.softmax(scores, -1).to(dtype).float()
    return (probabilities @ v).to(dtype)
