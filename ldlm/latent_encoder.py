"""The latent encoder: latents from the language model's hidden states. Used in training only.

The latent decoder's block with the two streams exchanged and no learned scale (S4; the rest is
lineage). It is part of the reference model and of the parameter account, and is not exported.
"""

import torch
from torch import Tensor, nn

from ldlm.attention import PerceiverAttention
from ldlm.config import LDLMConfig
from ldlm.layers import Module, NormedMLP, Residual, RMSNorm


class LatentEncoderBlock(Module):
    """state' = state + attn(state, context);  state_next = state' + MLP(state')."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        self.attention = PerceiverAttention(config, context="context", state_first=True)
        self.mlp = NormedMLP(config.d_model, config.d_mlp, config.norm_eps)
        self.residual = Residual()

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """state [B, T, d], context [B, T, d] -> [B, T, d]."""
        state = self.residual(state, self.attention(state, context))
        return self.residual(state, self.mlp(state))


class LatentEncoder(Module):
    """latents = latent_encoder(h)."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        d, n = config.d_model, config.n_positions
        self.p_scale = config.p_scale
        self.latents = nn.Parameter(torch.zeros(n, d))
        self.positions = nn.Parameter(torch.zeros(n, d))
        self.latents_norm = RMSNorm(d, config.norm_eps)
        self.blocks = nn.ModuleList(
            LatentEncoderBlock(config) for _ in range(config.encoder_blocks)
        )
        self.output_norm = RMSNorm(d, config.norm_eps)
        self.residual = Residual()

    def forward(self, h: Tensor) -> Tensor:
        """Hidden states h [B, T, d] -> latents [B, T, d], in h's dtype."""
        batch, length, _ = h.shape
        state = self.latents_norm(self.latents[:length]).expand(batch, -1, -1)
        context = self.residual(h, self.positions[:length] * self.p_scale)
        for block in self.blocks:
            state = block(state, context)
        return self.output_norm(state).to(h.dtype)
