"""A formal language of simple English: made from a grammar, and judged by it.

A text is in the language or it is not, so what a trained model writes can be marked without a
human or a second model. A sentence is its tokens joined by single spaces, the full stop being one:
"the dog sees Anna ." The grammar stands in english.pcfg.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from nltk import CFG, PCFG, Nonterminal, Production
from nltk.parse.earleychart import IncrementalLeftCornerChartParser

from ldlm.errors import ConfigError

SHORTEST = 3  # tokens of "Anna sings ."
LONGEST = 24  # tokens that may be asked for; the language has a few sentences of up to 40
DRAWS = 1 << 16  # uniform numbers asked of NumPy at once
JUDGEMENTS = 1 << 16  # sequences of categories whose verdict is kept

# What a symbol can become: the cumulative probabilities without the last, and the right-hand sides.
Choices = tuple[list[float], list[tuple[str | Nonterminal, ...]]]


@cache
def grammar() -> PCFG:
    """The grammar of english.pcfg."""
    return PCFG.fromstring(Path(__file__).with_name("english.pcfg").read_text("utf-8"))


@cache
def words() -> tuple[str, ...]:
    """Every token of the language, the full stop among them, sorted by code point."""
    sides = (production.rhs() for production in grammar().productions())
    return tuple(sorted({symbol for side in sides for symbol in side if isinstance(symbol, str)}))


def generate(count: int, seed: int, max_words: int = 15) -> list[str]:
    """Sentences drawn independently by the grammar's probabilities; some come more than once.

    A smaller count with the same seed and max_words gives the first of the same sentences.

    Args:
        count: how many, at least 0.
        seed: of Philox, at least 0.
        max_words: the most tokens a sentence may have, the full stop included; 3 to 24. A longer
            one is drawn again, so the others keep their proportions.

    Raises:
        ConfigError: an argument out of range.
    """
    for name, value, least in (("count", count, 0), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"the {name} is out of range", expected=f">= {least}", got=value)
    if not SHORTEST <= max_words <= LONGEST:
        raise ConfigError(
            "no sentences of that length are made",
            expected=f"{SHORTEST} <= max_words <= {LONGEST}",
            got=max_words,
        )
    uniforms = _uniforms(seed)
    sentences: list[str] = []
    while len(sentences) < count:
        tokens = _draw(uniforms)
        if len(tokens) <= max_words:
            sentences.append(" ".join(tokens))
    return sentences


def replace_one(sentence: str, seed: int) -> str:
    """The sentence with the token at one random position replaced by another one of words().

    Position and token are uniform. The result may be in the language too: a noun for a noun.

    Raises:
        ConfigError: the sentence is empty, or the seed is negative.
    """
    if not sentence or seed < 0:
        raise ConfigError(
            "no word can be replaced",
            expected="a sentence, and a seed >= 0",
            got=f"{sentence!r}, {seed}",
        )
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = sentence.split(" ")
    position = int(generator.integers(len(tokens)))
    others = [word for word in words() if word != tokens[position]]
    tokens[position] = others[int(generator.integers(len(others)))]
    return " ".join(tokens)


class Recogniser:
    """Says of any text whether it is a sentence of the language, of whatever length.

    Exact, because every word has one category: a text is a sentence if and only if its sequence of
    categories is one of the grammar above the words, which has few sequences and many repeats.
    """

    def __init__(self) -> None:
        self._categories = _categories()
        rules = [
            Production(rule.lhs(), [_as_terminal(symbol) for symbol in rule.rhs()])
            for rule in grammar().productions()
            if rule.lhs() not in _preterminals()
        ]
        self._start = grammar().start()
        self._parser = IncrementalLeftCornerChartParser(CFG(self._start, rules))
        self._longest = _longest(self._start)
        self._parses = lru_cache(JUDGEMENTS)(self._parse)

    def __call__(self, sentence: str) -> bool:
        """Whether the text is in the language: every token, every single space and nothing else."""
        tokens = sentence.split(" ")
        # A long text would cost the chart its length cubed, and no sentence is that long.
        if len(tokens) > self._longest or not all(token in self._categories for token in tokens):
            return False
        return self._parses(tuple(self._categories[token] for token in tokens))

    def _parse(self, categories: tuple[str, ...]) -> bool:
        chart = self._parser.chart_parse(categories)
        return next(chart.parses(self._start), None) is not None


def _uniforms(seed: int) -> Iterator[float]:
    """Endless numbers in [0, 1), float64."""
    generator = np.random.Generator(np.random.Philox(seed))
    while True:
        yield from generator.random(DRAWS).tolist()


def _draw(uniforms: Iterator[float]) -> list[str]:
    """One sentence's tokens, expanded from left to right; reads a number for every choice."""
    choices = _choices()
    tokens: list[str] = []
    pending: list[str | Nonterminal] = [grammar().start()]
    while pending:
        symbol = pending.pop()
        if isinstance(symbol, str):
            tokens.append(symbol)
        else:
            bounds, sides = choices[symbol]
            side = sides[bisect_right(bounds, next(uniforms))] if bounds else sides[0]
            pending.extend(reversed(side))
    return tokens


@cache
def _choices() -> dict[Nonterminal, Choices]:
    table: dict[Nonterminal, Choices] = {}
    for lhs in {production.lhs() for production in grammar().productions()}:
        productions = grammar().productions(lhs=lhs)
        # Without the last bound, which rounding may leave just below 1, no draw falls outside.
        bounds = list(accumulate(production.prob() for production in productions))[:-1]
        table[lhs] = (bounds, [production.rhs() for production in productions])
    return table


@cache
def _preterminals() -> frozenset[Nonterminal]:
    """The symbols that become one word each and nothing else."""
    return frozenset(
        lhs
        for lhs, (_, sides) in _choices().items()
        if all(len(side) == 1 and isinstance(side[0], str) for side in sides)
    )


@cache
def _categories() -> dict[str, str]:
    """The category of every word: its preterminal's name; a word of the rules is its own.

    Raises:
        ConfigError: the grammar puts a word into two categories.
    """
    table: dict[str, str] = {}
    for rule in grammar().productions():
        for word in (symbol for symbol in rule.rhs() if isinstance(symbol, str)):
            category = str(rule.lhs()) if rule.lhs() in _preterminals() else word
            if table.setdefault(word, category) != category:
                raise ConfigError(
                    f"the word {word!r} has two categories",
                    expected=table[word],
                    got=category,
                    remedy="keep it in one category of english.pcfg",
                )
    return table


def _as_terminal(symbol: str | Nonterminal) -> str | Nonterminal:
    """A preterminal as the word that stands for it in a sequence of categories."""
    return str(symbol) if symbol in _preterminals() else symbol


def _longest(symbol: str | Nonterminal) -> int:
    """The most tokens a symbol becomes; there is a most, as no symbol contains itself."""
    if isinstance(symbol, str):
        return 1
    return max(sum(_longest(part) for part in side) for side in _choices()[symbol][1])
