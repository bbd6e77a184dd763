"""LDLM: the four trained parts of the model and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ldlm import checkpoint
from ldlm.config import LDLMConfig
from ldlm.denoiser import Denoiser
from ldlm.latent_decoder import LatentDecoder
from ldlm.latent_encoder import LatentEncoder
from ldlm.token_decoder import TokenDecoder


class LDLM(nn.Module):
    """The reference model (arXiv 2605.07933, rebuilt from published facts).

    The constructor gives the paper's start: gains 1, residual scales 0, zero modulations. Use
    `ldlm.initialise` where every tensor should matter.

    Attributes:
        denoiser, latent_decoder, token_decoder: the three stages of generation.
        latent_encoder: for training only.
        latent_mean, latent_std: [d] buffers; z * latent_std + latent_mean enters the latent
            decoder. 0 and 1 until a checkpoint says otherwise.
        tokenizer_json: the text of the checkpoint's tokenizer.json, if it has one.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: LDLMConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer_json: str | None = None
        self.denoiser = Denoiser(config)
        self.latent_decoder = LatentDecoder(config)
        self.token_decoder = TokenDecoder(config)
        self.latent_encoder = LatentEncoder(config)
        self.register_buffer("latent_mean", torch.zeros(config.d_model))
        self.register_buffer("latent_std", torch.ones(config.d_model))
        self._zero_modulations()

    def _zero_modulations(self) -> None:
        zero = ("modulation.", "output.")
        for name, parameter in self.denoiser.named_parameters():
            if any(part in name for part in zero):
                nn.init.zeros_(parameter)

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> LDLM:
        """The model of a checkpoint folder, float32, on the CPU, in eval mode.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or holds other tensors.
            ConfigError: its config is not one of an LDLM.
        """
        from safetensors.torch import load_file

        folder = Path(path)
        config = checkpoint.read_config(folder)
        model = skeleton(config)
        weights = folder / checkpoint.WEIGHTS
        checkpoint.require_tensors(checkpoint.read_header(weights), model.shapes(), weights)
        model.load_state_dict(load_file(weights), assign=True)
        model.requires_grad_(False)
        model.tokenizer_json = checkpoint.read_tokenizer(folder)
        return model.eval()

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a checkpoint folder; see `ldlm.checkpoint.write`."""
        checkpoint.write(Path(path), self.config, self.state_dict(), self.tokenizer_json)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint of this model."""
        return {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}


def skeleton(config: LDLMConfig) -> LDLM:
    """The model on torch's meta device: every shape and no memory."""
    with torch.device("meta"):
        return LDLM(config)
