"""LDLM's blocks written out in float64 NumPy, from the equations, for comparison with the modules.

Nothing here calls the packages under test. Weights come in as a dict of float64 arrays whose
names are those of the module's state dict.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]

_erf = np.vectorize(math.erf)


def under(weights: Weights, prefix: str) -> Weights:
    """The weights below a prefix, with the prefix taken off."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    rms = np.sqrt((x**2).sum(-1, keepdims=True)) / math.sqrt(x.shape[-1])
    return gain * x / np.maximum(rms, eps)


def layer_norm(x: Array, gain: Array, eps: float) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return gain * (x - mean) / np.sqrt(variance + eps)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def heads(x: Array, n: int) -> Array:
    """[B, T, d] -> [B, n, T, d / n]."""
    return np.stack(np.split(x, n, axis=-1), axis=1)


def merge(x: Array) -> Array:
    """[B, n, T, d_head] -> [B, T, n d_head]."""
    return np.concatenate(list(np.moveaxis(x, 1, 0)), axis=-1)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(h: Array) -> Array:
    """h Phi(h)."""
    return h * 0.5 * (1 + _erf(h / math.sqrt(2)))


def gelu_tanh(h: Array) -> Array:
    return 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def perceiver_attention(
    state: Array,
    context: Array,
    w: Weights,
    *,
    n_heads: int,
    cap: float,
    eps: float,
    context_norm: str,
    context_first: bool,
) -> dict[str, Array]:
    """S4's equations of Perceiver attention; every intermediate under its own name."""
    d = state.shape[-1]
    d_head = d // n_heads
    r_bar = rms_norm(state, w["state_norm.gain"], eps)
    z_bar = rms_norm(context, w[f"{context_norm}.gain"], eps)
    p_a = r_bar @ w["qkv.weight"].T
    p_b = z_bar @ w["kv.weight"].T
    q = p_a[..., 0:d]
    Q = rms_norm(heads(q, n_heads), w["query_norm.gain"], eps)
    k_a, k_b = p_a[..., d : 2 * d], p_b[..., 0:d]
    v_a, v_b = p_a[..., 2 * d : 3 * d], p_b[..., d : 2 * d]
    k = np.concatenate([k_b, k_a] if context_first else [k_a, k_b], axis=1)
    v = np.concatenate([v_b, v_a] if context_first else [v_a, v_b], axis=1)
    K = rms_norm(heads(k, n_heads), w["key_norm.gain"], eps)
    S = Q @ np.swapaxes(K, -1, -2)
    F = cap * np.tanh(S / (cap * math.sqrt(d_head)))
    A = softmax(F)
    O = A @ heads(v, n_heads)  # noqa: E741
    o = merge(O)
    d_attn = o @ w["out.weight"].T
    return {
        "r_bar": r_bar, "z_bar": z_bar, "p_a": p_a, "p_b": p_b, "q": q, "Q": Q,
        "k_a": k_a, "k_b": k_b, "k": heads(k, n_heads), "K": K,
        "v_a": v_a, "v_b": v_b, "v": heads(v, n_heads),
        "S": S, "F": F, "A": A, "O": O, "o": o, "d_attn": d_attn,
    }  # fmt: skip # rows, as a table


def mlp_equations(x: Array, w: Weights, eps: float) -> dict[str, Array]:
    bar = layer_norm(x, w["norm.weight"], eps) + w["norm.bias"]
    h = bar @ w["up.weight"].T + w["up.bias"]
    g = gelu(h)
    return {"r'_bar": bar, "h": h, "g": g, "d_mlp": g @ w["down.weight"].T + w["down.bias"]}


def normed_mlp(x: Array, w: Weights, eps: float) -> Array:
    return mlp_equations(x, w, eps)["d_mlp"]


def decoder_block(
    r: Array, z_p: Array, w: Weights, *, n_heads: int, cap: float, eps: float
) -> dict[str, Array]:
    """One latent decoder block, all 27 equations of S4."""
    found = perceiver_attention(
        r,
        z_p,
        under(w, "attention."),
        n_heads=n_heads,
        cap=cap,
        eps=eps,
        context_norm="latents_norm",
        context_first=True,
    )
    scaled = (1 + w["attention_scale.scale"][0]) * found["d_attn"]
    r_prime = r + scaled
    mlp = mlp_equations(r_prime, under(w, "mlp."), eps)
    update = (1 + w["mlp_scale.scale"][0]) * mlp["d_mlp"]
    return {
        **found, "d_attn'": scaled, "r'": r_prime,
        **mlp, "d_mlp'": update, "r_next": r_prime + update,
    }  # fmt: skip # rows, as a table


def latent_decoder(
    z: Array, w: Weights, *, n_heads: int, cap: float, eps: float, blocks: int
) -> Array:
    d = z.shape[-1]
    P = w["positions"][: z.shape[1]] * d**-0.5
    query = (1 + w["query_scale.scale"][0]) * normed_mlp(
        w["mask_vector"], under(w, "query_mlp."), eps
    )
    r = np.broadcast_to(query + P, z.shape)
    for i in range(blocks):
        r = decoder_block(r, z + P, under(w, f"blocks.{i}."), n_heads=n_heads, cap=cap, eps=eps)[
            "r_next"
        ]
    return r


def latent_encoder(
    h: Array, w: Weights, *, n_heads: int, cap: float, eps: float, blocks: int
) -> Array:
    length, d = h.shape[1:]
    state = rms_norm(w["latents"][:length], w["latents_norm.gain"], eps)
    state = np.broadcast_to(state, h.shape)
    context = h + w["positions"][:length] * d**-0.5
    for i in range(blocks):
        b = under(w, f"blocks.{i}.")
        state = (
            state
            + perceiver_attention(
                state,
                context,
                under(b, "attention."),
                n_heads=n_heads,
                cap=cap,
                eps=eps,
                context_norm="context_norm",
                context_first=False,
            )["d_attn"]
        )
        state = state + normed_mlp(state, under(b, "mlp."), eps)
    return rms_norm(state, w["output_norm.gain"], eps)


def rotary_attention(q: Array, k: Array, v: Array, n_heads: int, base: float) -> Array:
    """softmax(R q (R k)^T / sqrt(d_head)) v, each pair turned by its complex phase."""
    length, d_head = q.shape[1], q.shape[-1] // n_heads
    half = d_head // 2
    phase = np.exp(1j * np.outer(np.arange(length), base ** (-np.arange(half) / half)))

    def turn(x: Array) -> Array:
        turned = (x[..., :half] + 1j * x[..., half:]) * phase
        return np.concatenate([turned.real, turned.imag], axis=-1)

    q, k, v = (heads(x, n_heads) for x in (q, k, v))
    return merge(softmax(turn(q) @ np.swapaxes(turn(k), -1, -2) / math.sqrt(d_head)) @ v)


def denoiser(
    x_t: Array,
    t: Array,
    x0_prev: Array,
    w: Weights,
    *,
    n_heads: int,
    eps: float,
    blocks: int,
    max_period: float,
    base: float,
) -> Array:
    half = x_t.shape[-1] // 2
    angles = t[:, None] * max_period ** (-np.arange(half) / half)
    e = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    c = silu(e @ w["time.0.weight"].T + w["time.0.bias"])
    c = silu(c @ w["time.2.weight"].T + w["time.2.bias"])
    x = np.concatenate([x_t, x0_prev], -1) @ w["input.weight"].T + w["input.bias"]
    for i in range(blocks):
        b = under(w, f"blocks.{i}.")
        m = c @ b["modulation.weight"].T + b["modulation.bias"]
        sh1, sc1, g1, sh2, sc2, g2 = np.split(m[:, None, :], 6, axis=-1)
        u = layer_norm(x, b["norm1.weight"], eps) * (1 + sc1) + sh1
        q, k, v = np.split(u @ b["qkv.weight"].T, 3, axis=-1)
        x = x + g1 * (rotary_attention(q, k, v, n_heads, base) @ b["out.weight"].T)
        u = layer_norm(x, b["norm2.weight"], eps) * (1 + sc2) + sh2
        h = gelu_tanh(u @ b["mlp.up.weight"].T + b["mlp.up.bias"])
        x = x + g2 * (h @ b["mlp.down.weight"].T + b["mlp.down.bias"])
    m = c @ w["final_modulation.weight"].T + w["final_modulation.bias"]
    sh, sc = np.split(m[:, None, :], 2, axis=-1)
    u = layer_norm(x, w["final_norm.weight"], eps) * (1 + sc) + sh
    return u @ w["output.weight"].T + w["output.bias"]


def token_decoder(
    h_hat: Array, w: Weights, *, n_heads: int, eps: float, blocks: int, base: float
) -> Array:
    x = h_hat
    for i in range(blocks):
        b = under(w, f"blocks.{i}.")
        u = layer_norm(x, b["norm1.weight"], eps)
        q, k, v = (u @ b[f"{name}.weight"].T for name in "qkv")
        x = x + rotary_attention(q, k, v, n_heads, base) @ b["out.weight"].T
        u = layer_norm(x, b["norm2.weight"], eps)
        x = x + (silu(u @ b["gate.weight"].T) * (u @ b["up.weight"].T)) @ b["down.weight"].T
    return x @ w["head.weight"].T
