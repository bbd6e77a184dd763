"""The denoiser: x0_hat from x_t, the time t and the previous estimate.

Twelve adaLN-modulated transformer blocks (lineage: the DiT of MDLM); called once per sampling
step. The final LayerNorm is the one of seed S0.
"""

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlm.attention import RotaryAttention
from ldlm.config import LDLMConfig
from ldlm.layers import BiaslessLayerNorm, Island, Linear, Module, Residual, Rotary


class TimeEmbedding(nn.Sequential, Island):
    """c = SiLU(W2 SiLU(W1 e + b1) + b2), e = [cos(t w), sin(t w)], in float32.

    w_i = max_period^(-i / (d/2)), i = 0 .. d/2 - 1. Shape: t [B] -> c [B, d].
    """

    kind: ClassVar[str] = "time_embedding"
    frequencies: Tensor

    def __init__(self, d: int, max_period: float) -> None:
        super().__init__(Linear(d, 2 * d), nn.SiLU(), Linear(2 * d, d))
        half = d // 2
        table = (max_period ** (-np.arange(half) / half)).astype(np.float32)
        self.register_buffer("frequencies", torch.from_numpy(table), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        t = self.enter(t)
        angles = t[:, None] * self.frequencies.to(t.dtype)  # [B, d/2]
        e = torch.cat((torch.cos(angles), torch.sin(angles)), dim=-1)
        up, activation, down = self
        return F.silu(down(activation(up(e))))


class MLP(Module):
    """W2 gelu_tanh(W1 x + b1) + b2; its norm is the block's modulated one. [.., d] -> [.., d]."""

    def __init__(self, d: int, d_mlp: int) -> None:
        super().__init__()
        self.up = Linear(d, d_mlp)
        self.down = Linear(d_mlp, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Modulation(Island):
    """y = x (1 + scale) + shift; part of the LayerNorm's float32 island (S0)."""

    kind: ClassVar[str] = "layer_norm"

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """x [B, T, d], shift and scale [B, 1, d] -> [B, T, d]."""
        return self.enter(x) * (1 + self.enter(scale)) + self.enter(shift)


class DenoiserBlock(Module):
    """x = x + g1 * attn(mod1(LN(x)));  x = x + g2 * MLP(mod2(LN(x)))."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        d = config.d_model
        self.norm1 = BiaslessLayerNorm(d, config.norm_eps)
        self.qkv = Linear(d, 3 * d, bias=False)
        self.attention = RotaryAttention(config.n_heads)
        self.out = Linear(d, d, bias=False)
        self.norm2 = BiaslessLayerNorm(d, config.norm_eps)
        self.mlp = MLP(d, config.d_mlp)
        self.modulation = Linear(d, 6 * d)
        self.modulate = Modulation()
        self.residual = Residual()

    def forward(self, x: Tensor, c: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, d], c [B, d], rotary tables [T, d_head] -> [B, T, d]."""
        sh1, sc1, g1, sh2, sc2, g2 = self.modulation(c)[:, None, :].chunk(6, dim=-1)
        q, k, v = self.qkv(self.modulate(self.norm1(x), sh1, sc1)).chunk(3, dim=-1)
        x = self.residual(x, self.out(self.attention(q, k, v, tables)), g1)
        return self.residual(x, self.mlp(self.modulate(self.norm2(x), sh2, sc2)), g2)


class Denoiser(Module):
    """x0_hat = denoiser(x_t, t, x0_prev), the x0-prediction of the diffusion."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        d = config.d_model
        self.time = TimeEmbedding(d, config.time_max_period)
        self.input = Linear(2 * d, d, bias=config.input_bias)
        self.rotary = Rotary(config.d_head, config.n_positions, config.rotary_base)
        self.blocks = nn.ModuleList(DenoiserBlock(config) for _ in range(config.denoiser_blocks))
        self.final_norm = BiaslessLayerNorm(d, config.norm_eps)
        self.final_modulation = Linear(d, 2 * d)
        self.modulate = Modulation()
        self.output = Linear(d, d)
        self.residual = Residual()

    def forward(self, x_t: Tensor, t: Tensor, x0_prev: Tensor) -> Tensor:
        """One estimate of the clean latents.

        Args:
            x_t: [B, T, d] latents at time t.
            t: [B] times in (0, 1].
            x0_prev: [B, T, d] the estimate of the step before, 0 at the first (self-conditioning).

        Returns:
            x0_hat [B, T, d], in x_t's dtype.
        """
        c = self.time(t)
        tables = self.rotary(x_t.shape[1])
        x = self.residual.enter(self.input(torch.cat((x_t, x0_prev), dim=-1)))
        for block in self.blocks:
            x = block(x, c, tables)
        sh, sc = self.final_modulation(c)[:, None, :].chunk(2, dim=-1)
        return self.output(self.modulate(self.final_norm(x), sh, sc)).to(x_t.dtype)
