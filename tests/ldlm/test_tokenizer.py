"""Tokenizers: GPT-2's and bytes, and where a text ends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ldlm import PRESETS
from ldlm.errors import TokenizerError
from ldlm.tokenizer import create, decode, parse

BASE, SMALL = PRESETS["base"], PRESETS["small"]


@pytest.mark.parametrize("config", [BASE, SMALL], ids=["gpt2", "bytes"])
def test_text_goes_through(config: object) -> None:
    tokenizer = create(config)  # type: ignore[arg-type]
    text = " Hello, wörld! 数"
    again = parse(tokenizer.to_str(), config)  # type: ignore[arg-type]
    assert again.decode(again.encode(text).ids) == text


def test_gpt2_ids_are_gpt2s() -> None:
    """Published ids of GPT-2: "Hello world" is 15496, 995 and end of text is 50256."""
    tokenizer = create(BASE)
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.token_to_id("<|endoftext|>") == 50256
    assert [tokenizer.token_to_id(token) for token in BASE.added_tokens] == [50257, 50258]


def test_byte_ids_are_the_order_of_their_symbols() -> None:
    """Weights are trained on these ids: they must not depend on the run that made the tokenizer."""
    tokenizer = create(SMALL)
    assert tokenizer.encode("!a z").ids == [0, 64, 220, 89]
    assert tokenizer.token_to_id("<|endoftext|>") == 256


def test_a_text_ends_at_the_first_end_of_text() -> None:
    tokenizer = create(BASE)
    ids = [*tokenizer.encode("one two").ids, 50256, *tokenizer.encode(" three").ids]
    assert decode(tokenizer, ids, BASE.end_of_text) == "one two"
    assert decode(tokenizer, ids, BASE.end_of_text, raw=True) == "one two<|endoftext|> three"
    assert decode(tokenizer, ids[:2], BASE.end_of_text) == "one two"
    assert decode(tokenizer, [*ids, 50256, *ids], BASE.end_of_text) == "one two"


def test_tokenizers_that_do_not_fit() -> None:
    with pytest.raises(TokenizerError, match="vocabulary"):
        parse(create(SMALL).to_str(), BASE)
    with pytest.raises(TokenizerError, match="cannot be read"):
        parse("{}", BASE)
    with pytest.raises(TokenizerError, match="vocabulary size"):
        create(replace(SMALL, vocab_size=1000))
    with pytest.raises(TokenizerError, match="end-of-text"):
        parse(create(SMALL).to_str(), replace(SMALL, end_of_text="</s>"))
