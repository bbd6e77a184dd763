"""The training set: sentences as token ids and as a frozen language model's hidden states."""

from __future__ import annotations

import numpy as np
import torch
from language import generate, words
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from ldlm.config import LDLMConfig


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


def frozen_language_model(config: LDLMConfig, seed: int) -> Tensor:
    """A table of hidden states [vocab, d], standard normal: what GPT-2 is for the real model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.vocab_size, config.d_model, generator=generator)
