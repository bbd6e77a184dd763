"""The latent decoder: estimates of the language model's hidden states from latents (seed S4).

Every query is the frozen mask vector; what differs between positions is the position table. One
block is the 27 equations of S4; its MLP and its scaled residuals are in ldlm/layers.py, its
attention in ldlm/attention.py.
"""

import torch
from torch import Tensor, nn

from ldlm.attention import PerceiverAttention
from ldlm.config import LDLMConfig
from ldlm.layers import Module, NormedMLP, Residual, ResidualScale


class LatentDecoderBlock(Module):
    """r' = r + (1 + s_a) attn(r, z^p);  r_next = r' + (1 + s_m) MLP(r') (S4)."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        self.attention = PerceiverAttention(config, context="latents", state_first=False)
        self.attention_scale = ResidualScale()
        self.mlp = NormedMLP(config.d_model, config.d_mlp, config.norm_eps)
        self.mlp_scale = ResidualScale()
        self.residual = Residual()

    def forward(self, r: Tensor, z_p: Tensor) -> Tensor:
        """r [B, T, d] state, z_p [B, T, d] latents with positions -> r_next [B, T, d]."""
        r = self.residual(r, self.attention_scale(self.attention(r, z_p)))
        return self.residual(r, self.mlp_scale(self.mlp(r)))


class LatentDecoder(Module):
    """h_hat = latent_decoder(z)."""

    mask_vector: Tensor

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        d = config.d_model
        self.p_scale = config.p_scale
        self.register_buffer("mask_vector", torch.zeros(d))  # frozen (S4)
        self.positions = nn.Parameter(torch.zeros(config.n_positions, d))
        self.query_mlp = NormedMLP(d, config.d_mlp, config.norm_eps)
        self.query_scale = ResidualScale()
        self.blocks = nn.ModuleList(
            LatentDecoderBlock(config) for _ in range(config.decoder_blocks)
        )
        self.residual = Residual()

    def forward(self, z: Tensor) -> Tensor:
        """Latents z [B, T, d] -> h_hat [B, T, d], in z's dtype.

        r_0 = (1 + s_q) MLP(m) + P, the same for every sample;  z^p = z + P (S4).
        """
        P = self.positions[: z.shape[1]] * self.p_scale  # [T, d]
        r = self.residual(P, self.query_scale(self.query_mlp(self.mask_vector)))
        r = r.expand(z.shape[0], -1, -1)  # [B, T, d]
        z_p = self.residual(z, P)
        for block in self.blocks:
            r = block(r, z_p)
        return r.to(z.dtype)


class LatentsToHidden(Module):
    """h_hat = latent_decoder(z * std + mean): the stage that generation calls.

    The latents' normalisation belongs to the checkpoint, not to the decoder's published
    parameters; it is the identity until a checkpoint says otherwise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, decoder: LatentDecoder, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.decoder = decoder
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, z: Tensor) -> Tensor:
        """Latents z [B, T, d] -> h_hat [B, T, d]."""
        return self.decoder(z * self.std.to(z.dtype) + self.mean.to(z.dtype))
