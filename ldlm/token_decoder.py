"""The token decoder: vocabulary logits from estimated hidden states.

Three pre-norm blocks with rotary attention and a gated SiLU MLP, then the head (S0: gain-only
LayerNorm and three blocks; the rest is lineage).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ldlm.attention import RotaryAttention
from ldlm.config import LDLMConfig
from ldlm.layers import BiaslessLayerNorm, Linear, Module, Residual, Rotary


class TokenDecoderBlock(Module):
    """x = x + W_o attn(LN(x));  x = x + W_down(SiLU(W_gate u) * W_up u), u = LN(x). No biases."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        d, d_mlp = config.d_model, config.d_mlp
        self.norm1 = BiaslessLayerNorm(d, config.norm_eps)
        self.q = Linear(d, d, bias=False)
        self.k = Linear(d, d, bias=False)
        self.v = Linear(d, d, bias=False)
        self.attention = RotaryAttention(config.n_heads)
        self.out = Linear(d, d, bias=False)
        self.norm2 = BiaslessLayerNorm(d, config.norm_eps)
        self.gate = Linear(d, d_mlp, bias=False)
        self.up = Linear(d, d_mlp, bias=False)
        self.down = Linear(d_mlp, d, bias=False)
        self.residual = Residual()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """x [B, T, d], rotary tables [T, d_head] -> [B, T, d]."""
        u = self.norm1(x)
        x = self.residual(x, self.out(self.attention(self.q(u), self.k(u), self.v(u), tables)))
        u = self.norm2(x)
        return self.residual(x, self.down(F.silu(self.gate(u)) * self.up(u)))


class TokenDecoder(Module):
    """logits = token_decoder(h_hat)."""

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        self.rotary = Rotary(config.d_head, config.n_positions, config.rotary_base)
        self.blocks = nn.ModuleList(TokenDecoderBlock(config) for _ in range(config.token_blocks))
        self.final_norm = (
            BiaslessLayerNorm(config.d_model, config.norm_eps) if config.token_final_norm else None
        )
        self.head = Linear(config.d_model, config.vocab_size, bias=False)
        self.residual = Residual()

    def forward(self, h_hat: Tensor) -> Tensor:
        """h_hat [B, T, d] -> logits [B, T, vocab], in h_hat's dtype."""
        x = self.residual.enter(h_hat)
        tables = self.rotary(x.shape[1])
        for block in self.blocks:
            x = block(x, tables)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return self.head(x).to(h_hat.dtype)


class GreedyTokens(Module):
    """token_ids = argmax(logits): the stage that generation calls."""

    def __init__(self, decoder: TokenDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, h_hat: Tensor) -> Tensor:
        """h_hat [B, T, d] -> token ids [B, T] int64."""
        return self.decoder(h_hat).argmax(dim=-1)
