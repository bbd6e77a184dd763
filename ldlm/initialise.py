"""Seeded initialisation that draws every tensor.

The paper's own start has zero modulations and zero residual scales, which multiply half of the
network by 0; parity on such a checkpoint proves nothing. Here nothing is 0 and no gain is 1.
"""

import fnmatch
import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from ldlm.errors import ConfigError
from ldlm.model import LDLM


@dataclass(frozen=True)
class Draw:
    """Normal(mean, std) for the tensors whose name matches; std None is 1 / sqrt(fan_in)."""

    pattern: str
    mean: float
    std: float | None
    reason: str


# First match wins.
DRAWS: tuple[Draw, ...] = (
    Draw("latent_mean", 0.0, 0.1, "a normalisation that is not the identity"),
    Draw("latent_std", 1.0, 0.1, "a normalisation that is not the identity"),
    Draw("*.scale", 0.0, 0.1, "a residual scale that does something"),
    Draw("*.query_norm.gain", 2.0, 0.2, "attention that picks, as trained ones do"),
    Draw("*.key_norm.gain", 2.0, 0.2, "with gains of 1 it averages, and all positions read alike"),
    Draw("*norm*.gain", 1.0, 0.1, "a gain that is not 1"),
    Draw("*norm*.weight", 1.0, 0.1, "a gain that is not 1"),
    Draw("*.bias", 0.0, 0.02, "a bias that is not 0"),
    Draw("*.positions", 0.0, 27.7, "about d^0.5 at base: multiplied by d^-0.5 when used"),
    Draw("latent_encoder.latents", 0.0, 1.0, "normalised when used"),
    Draw("latent_decoder.mask_vector", 0.0, 1.0, "normalised when used"),
    Draw("*.weight", 0.0, None, "keeps the variance of what it multiplies"),
)


def initialise(model: LDLM, seed: int) -> LDLM:
    """Fill every tensor of a model in place; each from its own stream of (seed, tensor name).

    Args:
        model: on the CPU, float32.
        seed: any integer >= 0.

    Raises:
        ConfigError: the seed is negative.
    """
    if seed < 0:
        raise ConfigError("the seed is out of range", expected="0 or more", got=seed)
    for name, tensor in model.state_dict().items():
        draw = next(d for d in DRAWS if fnmatch.fnmatchcase(name, d.pattern))
        std = tensor.shape[-1] ** -0.5 if draw.std is None else draw.std
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key)))
        values = generator.standard_normal(tuple(tensor.shape), dtype=np.float32)
        tensor.copy_(torch.from_numpy(values).mul_(std).add_(draw.mean))
    return model
