"""The training recipe: what is public of the paper's, at the size of a grammar.

One step minimises (arXiv 2605.07933, as far as it is public):

    z = encoder(h)                                       h: the frozen hidden states of the text
    diffusion:  || denoiser(x_t, t, x0_prev) - z ||^2    x_t = alpha(t) z + sigma(t) eps
    decoder:    || latent_decoder(z + noise) - h ||^2
    tokens:     cross entropy of token_decoder(h_hat), no gradient into h_hat

The frozen language model is a fixed table of embeddings here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ldlm import LDLM
from ldlm.schedule import TangentSchedule

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run.

    Attributes:
        steps: in all.
        autoencoder_steps: after these the encoder and the decoders are kept as they are, and the
            denoiser learns on latents that no longer move.
        batch_size: sentences per step.
        learning_rate, warmup, weight_decay, clip: of AdamW; linear warm-up, cosine to 0.
        ema: decay of the averaged weights, which are what is kept.
        decoder_noise: noise on the decoder's input, in units of the latents' root mean square.
        encoder_share: the most of the diffusion's gradient that reaches the encoder.
        share_at, share_width: the step where half of that share is reached, and how fast
            (a sigmoid in the step).
        self_conditioning: how often the denoiser sees its own first estimate.
        noise_low, noise_high: range of sigma / alpha that times are drawn from.
        adaptive: the part of the times that is drawn where the loss changes most.
        sentences, seed: the training set.
        autocast: bf16, or none; on a CPU without bf16 units, bf16 is 10 times slower than float32.
    """

    steps: int = 6500
    autoencoder_steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.999
    decoder_noise: float = 1.0
    encoder_share: float = 0.2
    share_at: int = 250
    share_width: int = 20
    self_conditioning: float = 0.5
    noise_low: float = 0.7
    noise_high: float = 60.0
    adaptive: float = 0.5
    sentences: int = 100_000
    seed: int = 0
    autocast: str = "none"

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + float(np.cos(np.pi * step / self.steps)))

    def share(self, step: int) -> float:
        """The part of the diffusion's gradient that reaches the encoder."""
        return self.encoder_share / (1 + float(np.exp((self.share_at - step) / self.share_width)))


class AdaptiveTimes:
    """Times to train at: half uniform in log(sigma / alpha), half where the loss changes most.

    What is decided at a noise level shows as the rise of the loss there: words at small noise,
    the plan of the sentence at large noise, where times uniform in t would hardly look.

    Attributes:
        loss: [bins], running mean of the diffusion loss per bin of log(sigma / alpha).
    """

    def __init__(self, recipe: Recipe, schedule: TangentSchedule, bins: int = 32) -> None:
        self.recipe, self.schedule = recipe, schedule
        self.edges = np.linspace(np.log(recipe.noise_low), np.log(recipe.noise_high), bins + 1)
        self.loss = np.linspace(0.0, 1.0, bins)

    def draw(self, count: int, random: np.random.Generator) -> tuple[Floats, NDArray[np.int64]]:
        """Times [count] in (0, 1) and the bins [count] that they are in."""
        smooth = np.convolve(np.pad(self.loss, 2, mode="edge"), np.ones(5) / 5, mode="valid")
        rise = np.maximum(np.gradient(np.maximum.accumulate(smooth)), 1e-6)
        bins = len(self.loss)
        part = self.recipe.adaptive
        weights = part * rise / rise.sum() + (1 - part) / bins
        chosen = random.choice(bins, size=count, p=weights / weights.sum())
        width = self.edges[1] - self.edges[0]
        ratio = np.exp(self.edges[chosen] + width * random.random(count))
        return 2 / np.pi * np.arctan(ratio / self.schedule.d), chosen

    def update(self, chosen: NDArray[np.int64], losses: NDArray[np.float32]) -> None:
        """Take note of the losses [count] at the bins [count]."""
        for index, loss in zip(chosen, losses, strict=True):
            self.loss[index] += 0.02 * (float(loss) - self.loss[index])


def encode(model: LDLM, h: Tensor) -> Tensor:
    """Normalised latents [B, T, d] from hidden states [B, T, d]."""
    return (model.latent_encoder(h) - model.latent_mean) / model.latent_std


def diffusion_loss(
    model: LDLM, z: Tensor, t: Floats, recipe: Recipe, generator: torch.Generator
) -> Tensor:
    """|| denoiser(x_t, t, x0_prev) - z ||^2 per sample [B], self-conditioned part of the time."""
    schedule = TangentSchedule(model.config.tangent_d, model.config.t_min)
    alpha, sigma = (
        torch.from_numpy(f(t).astype(np.float32))[:, None, None]
        for f in (schedule.alpha, schedule.sigma)
    )
    times = torch.from_numpy(t.astype(np.float32))
    x_t = alpha * z + sigma * torch.randn(z.shape, generator=generator)
    x0_prev = torch.zeros_like(z)
    if torch.rand((), generator=generator).item() < recipe.self_conditioning:
        with torch.no_grad():
            x0_prev = model.denoiser(x_t, times, x0_prev)
    x0_hat = model.denoiser(x_t, times, x0_prev)
    return (x0_hat - z).square().mean(dim=(1, 2))


def decoder_loss(
    model: LDLM, z: Tensor, h: Tensor, tokens: Tensor, recipe: Recipe, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The decoder's squared error and the token decoder's cross entropy, with noisy latents."""
    noisy = z + recipe.decoder_noise * torch.randn(z.shape, generator=generator)
    h_hat = model.latent_decoder(noisy * model.latent_std + model.latent_mean)
    logits = model.token_decoder(h_hat.detach())
    return F.mse_loss(h_hat, h), F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
