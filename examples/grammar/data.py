"""The training set: sentences as token ids and as a frozen language model's hidden states."""

from __future__ import annotations

import numpy as np
import torch
from language import generate, words
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from ldlm.config import LDLMConfig

# The model: one token per word, and short sentences.
CONFIG = LDLMConfig(
    d_model=128,
    n_heads=4,
    n_positions=16,
    vocab_size=len(words()) + 3,
    denoiser_blocks=6,
    encoder_blocks=1,
    decoder_blocks=2,
    token_blocks=1,
    time_max_period=0.02,  # frequencies of 1 to 50: at t near 1 small steps change the noise a lot
    sampler_steps=64,
)


def make_tokenizer(config: LDLMConfig) -> Tokenizer:
    """One token per word, then the end of text and the config's added tokens."""
    names = [*words(), config.end_of_text, *config.added_tokens]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=config.added_tokens[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([config.end_of_text, *config.added_tokens])
    return tokenizer


def token_ids(sentences: list[str], config: LDLMConfig) -> Tensor:
    """Ids [sentences, n_positions], int64; the end of text fills what a sentence leaves."""
    tokenizer = make_tokenizer(config)
    end = tokenizer.token_to_id(config.end_of_text)
    table = np.full((len(sentences), config.n_positions), end, np.int64)
    for row, encoding in zip(table, tokenizer.encode_batch(sentences), strict=True):
        row[: len(encoding.ids)] = encoding.ids
    return torch.from_numpy(table)


def training_sentences(count: int, seed: int, config: LDLMConfig) -> list[str]:
    """The training set; a position is left for the end of text."""
    return generate(count, seed, max_words=config.n_positions - 1)


def frozen_language_model(
    ids: Tensor, config: LDLMConfig, seed: int, alike: float = 0.75
) -> Tensor:
    """A table of hidden states [vocab, d], unit root mean square: what GPT-2 is for the real model.

    Like a language model's states, those of words that stand in the same places are alike: the
    share `alike` of a vector comes from the counts of its neighbours in the training set (positive
    pointwise mutual information, then a singular value decomposition), the rest is its own, at
    random. With all of it at random, the plan of a sentence shows no earlier in the noise than its
    words do, and the denoiser has to decide both at once.

    Args:
        ids: [sentences, T] tokens of the training set.
        seed: of the random part.
    """
    vocab, d = config.vocab_size, config.d_model
    pairs = torch.bincount((ids[:, :-1] * vocab + ids[:, 1:]).flatten(), minlength=vocab * vocab)
    follows = pairs.reshape(vocab, vocab).double()
    counts = torch.cat((follows, follows.T), dim=1)  # [vocab, 2 vocab]: words after, words before
    share = counts / counts.sum()
    expected = share.sum(1, keepdim=True) * share.sum(0, keepdim=True)
    information = torch.log((share / expected.clamp(min=1e-12)).clamp(min=1.0))
    left, values, _ = torch.linalg.svd(information, full_matrices=False)
    rank = min(32, d)
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(rank, d, generator=generator, dtype=torch.float64)
    common = (left[:, :rank] * values[:rank]) @ spread
    own = torch.randn(vocab, d, generator=generator, dtype=torch.float64)
    common, own = (x / x.norm(dim=1, keepdim=True).clamp(min=1e-9) for x in (common, own))
    table = alike**0.5 * common + (1 - alike) ** 0.5 * own
    unit: Tensor = table / table.square().mean(1, keepdim=True).sqrt()
    return unit.float()
