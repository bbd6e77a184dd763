"""What `ldlm evaluate --judge` asks about the grammar's texts."""

from __future__ import annotations

from data import CONFIG, training_sentences
from language import Recogniser
from recipe import Recipe

accepts = Recogniser()


def seen() -> list[str]:
    """The sentences that the published checkpoint was trained on."""
    return training_sentences(Recipe.sentences, Recipe.seed, CONFIG)
