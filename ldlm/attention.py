"""The two attentions of LDLM.

`RotaryAttention` (denoiser, token decoder) is plain: rotary q and k, scale 1 / sqrt(d_head),
one fused kernel. `PerceiverAttention` (latent encoder and decoder) reads two streams, normalises
queries and keys, and caps its scores. No attention of LDLM has a causal or a padding mask.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ldlm.config import LDLMConfig
from ldlm.layers import Island, Linear, Module, RMSNorm, Softcap, no_autocast, rotate


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """[B, T, H * d_head] -> [B, H, T, d_head]."""
    batch, length, width = x.shape
    return x.view(batch, length, n_heads, width // n_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, d_head] -> [B, T, H * d_head]."""
    batch, heads, length, d_head = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * d_head)


class FusedAttention(Island):
    """O = softmax(Q K^T / sqrt(d_head)) V as one operator, in one dtype throughout."""

    kind: ClassVar[str] = "fused_attention"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, T, d_head] -> [B, H, T, d_head]."""
        return F.scaled_dot_product_attention(self.enter(q), self.enter(k), self.enter(v))


class CappedSoftmax(Island):
    """A = softmax(F), F = cap * tanh(S / (cap * sqrt(d_head))) (S4)."""

    kind: ClassVar[str] = "softcap_softmax"

    def __init__(self, cap: float, d_head: int) -> None:
        super().__init__()
        self.softcap = Softcap(cap, d_head)

    def forward(self, S: Tensor) -> Tensor:
        """S [B, H, T, n_keys] -> A of the same shape."""
        S = self.enter(S)
        with no_autocast(S):
            return torch.softmax(self.softcap(S), dim=-1)


class CappedAttention(Island):
    """O = A V with A from the capped scores of Q K^T; the two products in this island's dtype."""

    kind: ClassVar[str] = "capped_attention"

    def __init__(self, cap: float, d_head: int) -> None:
        super().__init__()
        self.softmax = CappedSoftmax(cap, d_head)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Q [B, H, T, d_head], K and V [B, H, n_keys, d_head] -> O [B, H, T, d_head]."""
        S = self.enter(Q) @ self.enter(K).transpose(-2, -1)
        A = self.softmax(S)
        return self.enter(A) @ self.enter(V)


class RotaryAttention(Module):
    """Plain self-attention core of the denoiser and the token decoder (lineage)."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attend = FusedAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """q, k, v [B, T, d] and rotary tables [T, d_head] -> [B, T, d]."""
        q, k, v = (split_heads(x, self.n_heads) for x in (q, k, v))
        return merge_heads(self.attend(rotate(q, tables), rotate(k, tables), v))


class PerceiverAttention(Module):
    """Attention from a state to [latents ; text side], both normalised first (S4).

    The query stream ("state") also contributes keys and values. The latents' keys and values
    always come first: in the decoder they are the context, in the encoder the state.

    Args:
        context: name of the other stream, `latents` in the decoder, `context` in the encoder.
        state_first: whether the state's keys and values precede the context's.
    """

    def __init__(self, config: LDLMConfig, *, context: str, state_first: bool) -> None:
        super().__init__()
        d, d_head, eps = config.d_model, config.d_head, config.norm_eps
        self.n_heads = config.n_heads
        self.context_norm_name = f"{context}_norm"
        self.state_first = state_first
        self.state_norm = RMSNorm(d, eps)
        self.add_module(self.context_norm_name, RMSNorm(d, eps))
        self.qkv = Linear(d, 3 * d, bias=False)
        self.kv = Linear(d, 2 * d, bias=False)
        self.query_norm = RMSNorm(d_head, eps)  # gains shared by the heads
        self.key_norm = RMSNorm(d_head, eps)
        self.attend = CappedAttention(config.softcap, d_head)
        self.out = Linear(d, d, bias=False)

    def forward(self, state: Tensor, context: Tensor) -> Tensor:
        """state [B, T, d], context [B, T', d] -> Delta_attn [B, T, d]."""
        context_norm = self.get_submodule(self.context_norm_name)
        q, k_a, v_a = self.qkv(self.state_norm(state)).chunk(3, dim=-1)
        k_b, v_b = self.kv(context_norm(context)).chunk(2, dim=-1)

        k = torch.cat((k_a, k_b) if self.state_first else (k_b, k_a), dim=1)  # [B, T + T', d]
        v = torch.cat((v_a, v_b) if self.state_first else (v_b, v_a), dim=1)

        Q = self.query_norm(split_heads(q, self.n_heads))
        K = self.key_norm(split_heads(k, self.n_heads))
        V = split_heads(v, self.n_heads)
        return self.out(merge_heads(self.attend(Q, K, V)))
