"""Stress weights: what trained transformers have and freshly drawn weights lack.

Outlier channels of magnitude 1e3 in every residual stream, so that the squares inside the norms
pass 65504; attention scores that reach the softcap; gains far from 1. Fresh weights make every
precision look harmless.
"""

import copy
import fnmatch

import torch
from torch import Tensor

from engines.runtime.stage import Array
from export.stages import StageSpec
from ldlm.model import LDLM

OUTLIER = 1000.0
CHANNELS = (3, 17, 40, 77)
OUTLIERS = OUTLIER * torch.tensor([1.0, -1.0, 1.0, -1.0])  # as many up as down: the mean stays

# Gains of queries and keys: scores / sqrt(d_head) spread with std GAIN^2, past the cap of 50.
GAIN = 5.0

# Gains that training would have adapted to the outliers.
TAMED = (
    "denoiser.blocks.*.norm?.weight",
    "denoiser.final_norm.weight",
    "latent_decoder.blocks.*.attention.state_norm.gain",
    "latent_decoder.blocks.*.attention.latents_norm.gain",
    "latent_decoder.blocks.*.mlp.norm.weight",
    "token_decoder.blocks.*.norm?.weight",
)
SHARPENED = (
    "latent_decoder.blocks.*.attention.query_norm.gain",
    "latent_decoder.blocks.*.attention.key_norm.gain",
)


def stressed(model: LDLM) -> LDLM:
    """A float32 copy of a model with outliers, large scores and uneven gains; the shapes stay."""
    model = copy.deepcopy(model)
    channels = list(CHANNELS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in TAMED):
                _tame(parameter)
            elif any(fnmatch.fnmatchcase(name, pattern) for pattern in SHARPENED):
                parameter.mul_(GAIN / parameter.mean())
        # What brings the outliers in: a bias, the position table; for the token decoder, h_hat.
        model.denoiser.input.bias[channels] = OUTLIERS
        decoder = model.latent_decoder
        decoder.positions[:, channels] = OUTLIERS / decoder.p_scale
        # The token decoder has no norm before its head, which must be deaf to them.
        model.token_decoder.head.weight[:, channels] *= 1e-3
    return model


def stress_inputs(spec: StageSpec, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """A stage's inputs as the stressed stage before it would make them: h_hat has the outliers."""
    if spec.component != "token_decoder":
        return arrays
    h_hat = arrays[0].copy()
    h_hat[..., list(CHANNELS)] = OUTLIERS.numpy()
    return (h_hat,)


def _tame(gain: Tensor) -> None:
    """Gains as training leaves them: small on the outliers, large enough on the rest.

    A norm divides by the outliers' size; the other channels get back what that takes.
    """
    lift = OUTLIER * (len(CHANNELS) / gain.numel()) ** 0.5
    gain.mul_(lift)
    gain[list(CHANNELS)] = 0.05
