"""The modules against the equations, written out in float64 NumPy."""

from __future__ import annotations

import copy

import numpy as np
import numpy_reference as reference
import pytest
import torch
from msgspec.structs import replace

from ldlm import LDLM, PRESETS
from ldlm.initialise import initialise
from ldlm.latent_decoder import LatentsToHidden

B, T = 2, 5


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}


def relative(got: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture(scope="module")
def exact(small: LDLM) -> LDLM:
    return copy.deepcopy(small).double()


@pytest.mark.parametrize("preset", ["small", "base"])
def test_decoder_block_is_the_27_equations(preset: str) -> None:
    """S4's block in float64 to 1e-12 and in float32 to 5e-6, scores large enough to be capped."""
    config = PRESETS[preset]
    from ldlm.latent_decoder import LatentDecoderBlock

    block = LatentDecoderBlock(config).requires_grad_(False)
    for i, parameter in enumerate(block.parameters()):
        std = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        offset = 1.0 if parameter.ndim == 1 and parameter.numel() > 2 else 0.0
        parameter.copy_(torch.from_numpy(offset + std * normal(*parameter.shape, seed=i)))
    block.attention.query_norm.gain.mul_(6)  # |S| / sqrt(d_head) reaches the cap of 50
    block.attention.key_norm.gain.mul_(6)
    r, z_p = normal(B, T, config.d_model, seed=98), normal(B, T, config.d_model, seed=99)
    constants = {"n_heads": config.n_heads, "cap": config.softcap, "eps": config.norm_eps}
    expected = reference.decoder_block(r, z_p, weights(block), **constants)
    assert np.abs(expected["S"]).max() / config.d_head**0.5 > config.softcap

    exact = copy.deepcopy(block).double()(torch.from_numpy(r), torch.from_numpy(z_p))
    assert exact.dtype == torch.float64
    assert relative(exact, expected["r_next"]) <= 1e-12
    single = block(torch.from_numpy(r).float(), torch.from_numpy(z_p).float())
    assert single.dtype == torch.float32
    rounded = reference.decoder_block(
        r.astype(np.float32).astype(np.float64),
        z_p.astype(np.float32).astype(np.float64),
        weights(block),
        **constants,
    )
    assert relative(single, rounded["r_next"]) <= 5e-6


@pytest.mark.parametrize(
    "change",
    [
        {"cap": 5.0},  # the cap
        {"eps": 0.5},  # the norms' eps
    ],
)
def test_the_comparison_would_notice(exact: LDLM, change: dict[str, float]) -> None:
    config = exact.config
    constants = {"n_heads": config.n_heads, "cap": config.softcap, "eps": config.norm_eps}
    block = exact.latent_decoder.blocks[0]
    r, z_p = 0.1 * normal(B, T, config.d_model, seed=1), normal(B, T, config.d_model, seed=2)
    got = block(torch.from_numpy(r), torch.from_numpy(z_p))
    wrong = reference.decoder_block(r, z_p, weights(block), **{**constants, **change})
    assert relative(got, wrong["r_next"]) > 1e-6


def test_latent_decoder(exact: LDLM) -> None:
    config = exact.config
    z = normal(B, T, config.d_model)
    expected = reference.latent_decoder(
        z,
        weights(exact.latent_decoder),
        n_heads=config.n_heads,
        cap=config.softcap,
        eps=config.norm_eps,
        blocks=config.decoder_blocks,
    )
    assert relative(exact.latent_decoder(torch.from_numpy(z)), expected) <= 1e-12


def test_latent_encoder(exact: LDLM) -> None:
    config = exact.config
    h = normal(B, T, config.d_model)
    expected = reference.latent_encoder(
        h,
        weights(exact.latent_encoder),
        n_heads=config.n_heads,
        cap=config.softcap,
        eps=config.norm_eps,
        blocks=config.encoder_blocks,
    )
    assert relative(exact.latent_encoder(torch.from_numpy(h)), expected) <= 1e-12


def test_denoiser(exact: LDLM) -> None:
    """To 1e-6: rotary and time tables are float32 by definition."""
    config = exact.config
    x_t, x0_prev = normal(B, T, config.d_model, seed=1), normal(B, T, config.d_model, seed=2)
    t = np.array([0.9, 0.3])
    expected = reference.denoiser(
        x_t,
        t,
        x0_prev,
        weights(exact.denoiser),
        n_heads=config.n_heads,
        eps=config.norm_eps,
        blocks=config.denoiser_blocks,
        max_period=config.time_max_period,
        base=config.rotary_base,
    )
    got = exact.denoiser(*map(torch.from_numpy, (x_t, t, x0_prev)))
    assert got.dtype == torch.float64
    assert relative(got, expected) <= 1e-6
    swapped = exact.denoiser(*map(torch.from_numpy, (x0_prev, t, x_t)))
    assert relative(swapped, expected) > 1e-2


def test_token_decoder(exact: LDLM) -> None:
    config = exact.config
    h_hat = normal(B, T, config.d_model)
    expected = reference.token_decoder(
        h_hat,
        weights(exact.token_decoder),
        n_heads=config.n_heads,
        eps=config.norm_eps,
        blocks=config.token_blocks,
        base=config.rotary_base,
    )
    assert relative(exact.token_decoder(torch.from_numpy(h_hat)), expected) <= 1e-6


def test_latents_are_normalised_back_before_they_are_decoded(exact: LDLM) -> None:
    """z std + mean, and neither (z + mean) std nor the two exchanged."""
    z = torch.from_numpy(normal(B, T, exact.config.d_model))
    stage = LatentsToHidden(exact.latent_decoder, exact.latent_mean, exact.latent_std)
    expected = exact.latent_decoder(z * exact.latent_std + exact.latent_mean)
    assert relative(stage(z), expected.numpy()) <= 1e-12


def test_the_final_norm_of_a_token_decoder_is_applied() -> None:
    """Twice its gain is twice the logits: nothing but the head follows it."""
    config = replace(PRESETS["small"], token_final_norm=True)
    decoder = initialise(LDLM(config), 0).requires_grad_(False).token_decoder
    h_hat = torch.from_numpy(normal(B, T, config.d_model)).float()
    before = decoder(h_hat)
    assert decoder.final_norm is not None
    decoder.final_norm.weight.mul_(2)
    torch.testing.assert_close(decoder(h_hat), 2 * before)


def test_one_sample_does_not_see_another(small: LDLM) -> None:
    z = torch.from_numpy(normal(3, T, small.config.d_model)).float()
    together = small.latent_decoder(z)
    alone = torch.cat([small.latent_decoder(z[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_reconstruction_choices_change_the_model() -> None:
    """Section 7's unknowns are fields that do something, each in its own direction."""
    base = PRESETS["small"]
    bare = replace(base, input_bias=False, token_final_norm=True, position_scale=1.0)
    model = initialise(LDLM(bare), 0)
    names = set(model.state_dict())
    assert "denoiser.input.bias" not in names
    assert "token_decoder.final_norm.weight" in names
    assert model.latent_decoder.p_scale == model.latent_encoder.p_scale == 1.0
    assert LDLM(base).latent_decoder.p_scale == base.d_model**-0.5
