"""The formal language of the example: what it makes is what it accepts, and little else."""

from __future__ import annotations

from collections import Counter

import language
import nltk
import pytest

from ldlm.errors import ConfigError

GOOD = [
    "Anna sings .",
    "the dog sees a cat .",
    "every small child laughs gladly .",
    "this queen waits near a tall horse .",
    "Ben helps the baker behind the kind doctor .",
    "the girl who dances likes Hugo .",
    "a farmer meets the boy who follows this brave fox .",
    "Clara runs and the rabbit sleeps .",
    "Emma says that every bird sings today .",
    # 40 tokens, the longest there is: more than generate() makes, and still in the language.
    "the girl who sees the wise king meets the boy who likes the tall fox near the small dog and "
    "the cat who helps the kind queen visits the bird who calls the quiet horse with the brave "
    "child .",
]

BAD = {
    "empty": "",
    "a blank": " ",
    "the full stop alone": ".",
    "no full stop": "Anna sings",
    "two full stops": "Anna sings . .",
    "no subject": "sees a cat .",
    "two subjects": "Anna the dog sleeps .",
    "no verb": "the dog .",
    "two verbs": "the dog runs sleeps .",
    "missing object": "the dog sees .",
    "object of an intransitive verb": "the dog sleeps a cat .",
    "missing determiner": "dog sleeps .",
    "'a' after the noun": "dog a sleeps .",
    "two determiners": "the every dog sleeps .",
    "two adjectives": "the small tall dog sleeps .",
    "adjective after the noun": "the dog small sleeps .",
    "determiner before a name": "the Anna sleeps .",
    "adverb after an object": "the dog sees Anna today .",
    "preposition at the end": "the dog sleeps near .",
    "relative clause of a name": "Anna who sings runs .",
    "nested relative clauses": "the dog who sees the cat who sings runs .",
    "a noun that says": "the dog says that Anna sings .",
    "'says' without 'that'": "Anna says Ben sings .",
    "'and' between nouns": "the dog and the cat sleeps .",
    "three clauses": "Anna sings and Ben runs and Emma waits .",
    "unknown word": "the dog eats .",
    "a category for a word": "Name IV .",
    "another case": "The dog sleeps .",
    "full stop at the word": "Anna sings.",
    "two spaces": "Anna  sings .",
    "a space in front": " Anna sings .",
    "a line break": "Anna sings .\n",
    "two sentences": "Anna sings . Ben runs .",
    "far too long": "the dog sees " * 2000 + ".",
}


@pytest.fixture(scope="module")
def recogniser() -> language.Recogniser:
    return language.Recogniser()


@pytest.fixture(scope="module")
def many() -> list[str]:
    return language.generate(20_000, seed=1)


@pytest.mark.parametrize("sentence", GOOD)
def test_a_good_sentence_is_accepted(recogniser: language.Recogniser, sentence: str) -> None:
    assert recogniser(sentence)


@pytest.mark.parametrize("sentence", BAD.values(), ids=BAD.keys())
def test_a_bad_sentence_is_rejected(recogniser: language.Recogniser, sentence: str) -> None:
    assert not recogniser(sentence)


def test_every_generated_sentence_is_accepted(recogniser: language.Recogniser) -> None:
    for max_words in (3, 15, 24):
        assert all(map(recogniser, language.generate(500, 0, max_words)))


def test_most_sentences_with_one_word_replaced_are_rejected(
    recogniser: language.Recogniser,
) -> None:
    sentences = language.generate(500, seed=0)
    replaced = [language.replace_one(sentence, seed) for seed, sentence in enumerate(sentences)]
    assert 0.85 <= sum(not recogniser(sentence) for sentence in replaced) / 500 <= 0.97


def test_judging_by_categories_is_judging_by_words(recogniser: language.Recogniser) -> None:
    """Another parser, on the words themselves, comes to the same verdict."""
    grammar = language.grammar()
    parser = nltk.EarleyChartParser(nltk.CFG(grammar.start(), grammar.productions()))
    sentences = language.generate(200, seed=2)
    sentences += [language.replace_one(sentence, seed) for seed, sentence in enumerate(sentences)]
    verdicts = [any(True for _ in parser.parse(sentence.split())) for sentence in sentences]
    assert [recogniser(sentence) for sentence in sentences] == verdicts


def test_the_seed_decides_the_sentences() -> None:
    assert language.generate(50, seed=7) == language.generate(50, seed=7)
    assert language.generate(50, seed=7) != language.generate(50, seed=8)


def test_fewer_sentences_are_the_first_of_more(many: list[str]) -> None:
    assert language.generate(100, seed=1) == many[:100]
    assert language.generate(0, seed=1) == []


@pytest.mark.parametrize("max_words", [3, 6, 15, 24])
def test_no_sentence_has_more_tokens_than_asked_for(max_words: int) -> None:
    lengths = [len(sentence.split(" ")) for sentence in language.generate(2000, 3, max_words)]
    assert min(lengths) == 3
    assert max(lengths) <= max_words


def test_the_sentences_are_short_and_seldom_the_same(many: list[str]) -> None:
    assert 6.5 < sum(len(sentence.split(" ")) for sentence in many) / len(many) < 7.5
    assert len(set(many)) >= 15_000


def test_the_choices_have_the_grammar_s_shares() -> None:
    """Longer sentences are nearly all kept, so the shares of S show in the texts."""
    sentences = language.generate(20_000, 4, 24)
    assert sum(" and " in text for text in sentences) / 20_000 == pytest.approx(0.12, abs=0.01)
    assert sum(" says " in text for text in sentences) / 20_000 == pytest.approx(0.14, abs=0.01)


def test_every_word_occurs(many: list[str]) -> None:
    assert {word for sentence in many for word in sentence.split(" ")} == set(language.words())


def test_the_vocabulary_is_small_and_sorted() -> None:
    words = language.words()
    assert 65 <= len(words) <= 85
    assert list(words) == sorted(set(words))


def test_every_word_has_one_category() -> None:
    categories = Counter(
        word
        for lhs in {rule.lhs() for rule in language.grammar().productions()}
        for word in {
            symbol
            for rule in language.grammar().productions(lhs=lhs)
            for symbol in rule.rhs()
            if isinstance(symbol, str)
        }
    )
    assert set(categories.values()) == {1}


def test_the_probabilities_of_every_symbol_sum_to_1() -> None:
    """nltk itself lets a sum be off by a hundredth."""
    for lhs in {rule.lhs() for rule in language.grammar().productions()}:
        shares = [rule.prob() for rule in language.grammar().productions(lhs=lhs)]
        assert sum(shares) == pytest.approx(1, abs=1e-12)


def test_a_is_never_an() -> None:
    for symbol in ("N", "Adj"):
        rules = language.grammar().productions(lhs=nltk.Nonterminal(symbol))
        assert not [rule for rule in rules if rule.rhs()[0][0] in "aeiou"]


def test_one_word_is_replaced_by_another() -> None:
    for seed, before in enumerate(language.generate(100, seed=5)):
        after = language.replace_one(before, seed)
        assert after == language.replace_one(before, seed)
        pairs = list(zip(before.split(" "), after.split(" "), strict=True))
        assert [new in language.words() for old, new in pairs if old != new] == [True]


@pytest.mark.parametrize("arguments", [(-1, 0, 15), (1, -1, 15), (1, 0, 2), (1, 0, 25)])
def test_sentences_that_cannot_be_made_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        language.generate(*arguments)


@pytest.mark.parametrize(("sentence", "seed"), [("", 0), ("Anna sings .", -1)])
def test_a_word_that_cannot_be_replaced_is_refused(sentence: str, seed: int) -> None:
    with pytest.raises(ConfigError, match="replaced"):
        language.replace_one(sentence, seed)
