"""The parameter account: every line of it, at the published size."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ldlm import PRESETS
from ldlm.account import PUBLISHED, account, gpt2_parameters
from ldlm.model import skeleton

EXPECTED = {
    "perceiver attention": 3_540_608,
    "decoder MLP": 4_723_968,
    "residual scale": 2,
    "latent decoder block": 8_264_580,
    "latent decoder blocks": 49_587_480,
    "denoiser final norm": 768,
    "latent encoder": 51_161_856,
    "latent decoder": 55_097_882,
    "denoiser": 132_836_352,
    "token decoder": 66_915_072,
    "trained": 306_011_162,
    "frozen": 124_442_112,
}


def test_every_line_at_base() -> None:
    lines = {line.component: line for line in account(PRESETS["base"])}
    assert {name: line.parameters for name, line in lines.items()} == EXPECTED
    for name, published in PUBLISHED.items():
        assert lines[name].published == lines[name].parameters == published


def test_counts_are_the_tensors() -> None:
    model = skeleton(PRESETS["base"])
    assert sum(p.numel() for p in model.parameters()) == EXPECTED["trained"]
    assert sum(p.numel() for p in model.denoiser.blocks[0].parameters()) == 10_626_816
    assert sum(p.numel() for p in model.token_decoder.blocks[0].parameters()) == 9_438_720
    assert sum(p.numel() for p in model.latent_encoder.blocks[0].parameters()) == 8_264_576


def test_gpt2_from_its_shapes() -> None:
    assert gpt2_parameters() == 124_439_808


@pytest.mark.parametrize(
    "change", [{"input_bias": False}, {"token_final_norm": True}, {"vocab_size": 50257}]
)
def test_a_changed_config_changes_the_total(change: dict[str, int]) -> None:
    config = replace(PRESETS["base"], **change)
    trained = next(line for line in account(config) if line.component == "trained")
    assert trained.parameters != EXPECTED["trained"]


def test_published_stands_beside_changed_totals() -> None:
    """A config of another size is allowed; its totals are shown next to the published ones."""
    config = replace(PRESETS["base"], token_final_norm=True)
    trained = next(line for line in account(config) if line.component == "trained")
    assert trained.parameters == EXPECTED["trained"] + 768
    assert trained.published == EXPECTED["trained"]
    small = {line.component: line for line in account(PRESETS["small"])}
    assert all(line.published is None for line in small.values())
    assert 1_500_000 < small["trained"].parameters < 3_000_000


def test_state_dict_names() -> None:
    """The names that checkpoints rely on (docs/model.md)."""
    names = set(skeleton(PRESETS["base"]).state_dict())
    expected = {
        "denoiser.time.0.weight", "denoiser.time.2.bias", "denoiser.input.bias",
        "denoiser.blocks.11.norm1.weight", "denoiser.blocks.0.qkv.weight",
        "denoiser.blocks.0.out.weight", "denoiser.blocks.0.norm2.weight",
        "denoiser.blocks.0.mlp.up.bias", "denoiser.blocks.0.mlp.down.weight",
        "denoiser.blocks.0.modulation.bias", "denoiser.final_norm.weight",
        "denoiser.final_modulation.weight", "denoiser.output.bias",
        "latent_decoder.mask_vector", "latent_decoder.positions",
        "latent_decoder.query_mlp.norm.bias", "latent_decoder.query_scale.scale",
        "latent_decoder.blocks.5.attention.latents_norm.gain",
        "latent_decoder.blocks.5.attention_scale.scale", "latent_decoder.blocks.5.mlp_scale.scale",
        "latent_mean", "latent_std", "latent_encoder.latents", "latent_encoder.positions",
        "latent_encoder.latents_norm.gain", "latent_encoder.output_norm.gain",
        "latent_encoder.blocks.5.attention.context_norm.gain",
        "latent_encoder.blocks.5.mlp.norm.weight", "token_decoder.blocks.2.gate.weight",
        "token_decoder.blocks.2.q.weight", "token_decoder.head.weight",
    }  # fmt: skip # rows, as a table
    assert expected <= names
    assert not any("rotary" in name or "frequencies" in name for name in names)
