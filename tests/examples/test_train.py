"""Training the grammar's model: a cut run ends as an uncut one, and nothing else changes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import train
from data import CONFIG, frozen_language_model, make_tokenizer, token_ids, training_sentences
from language import words
from recipe import AdaptiveTimes, Recipe

from ldlm.errors import CheckpointError, ConfigError
from ldlm.schedule import TangentSchedule

TINY = Recipe(
    steps=8, autoencoder_steps=4, share_at=1, share_width=1, batch_size=4, warmup=2, sentences=300
)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.long
def test_a_run_that_was_cut_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut while the encoder still learns, and again while only the denoiser does."""
    whole = weights(train.train(tmp_path / "whole", TINY))
    monkeypatch.setattr(train, "SAVE_EVERY", 1)
    for cut in (2, 6):
        one_step, calls = train.one_step, []

        def stop(run, data, one_step=one_step, calls=calls, cut=cut):  # type: ignore[no-untyped-def]
            calls.append(run.step)
            if run.step == cut:
                raise KeyboardInterrupt
            return one_step(run, data)

        monkeypatch.setattr(train, "one_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(tmp_path / "cut", TINY)
        monkeypatch.setattr(train, "one_step", one_step)
    resumed = weights(train.train(tmp_path / "cut", TINY))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(whole["latent_mean"], torch.zeros(CONFIG.d_model))


def test_a_run_is_not_continued_with_another_recipe(tmp_path: Path) -> None:
    train.train(tmp_path / "run", replace(TINY, steps=5))
    with pytest.raises(CheckpointError, match="another recipe"):
        train.train(tmp_path / "run", replace(TINY, steps=5, seed=1))
    with pytest.raises(ConfigError, match="learn nothing"):
        train.train(tmp_path / "short", replace(TINY, steps=4))


def test_a_resumed_log_says_every_step_once(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 100}\n{"step": 1000}\n{"step": 1100}\n')
    train.cut_log(tmp_path / "log.jsonl", 1000)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 100}\n{"step": 1000}\n'


def test_only_the_denoiser_learns_once_the_encoder_is_kept() -> None:
    run = train.new_run(TINY)
    ids = token_ids(training_sentences(TINY.sentences, 0, CONFIG), CONFIG)
    data = train.Data(ids, frozen_language_model(ids, CONFIG, 0))
    train.one_step(run, data)
    run.step = TINY.autoencoder_steps
    train.keep_autoencoder(run, data)
    before = weights(run.model)
    losses = train.one_step(run, data)
    changed = {n for n, t in run.model.state_dict().items() if not torch.equal(t, before[n])}
    assert changed
    assert all(name.startswith("denoiser.") for name in changed)
    assert losses["diffusion"] > 0
    assert losses["decoder"] == losses["tokens"] == 0.0
    z = data.latents.flatten(0, 1)
    assert z.mean().abs() < 0.01
    assert (z.std() - 1).abs() < 0.02


def test_tokens_are_words_and_end() -> None:
    tokenizer = make_tokenizer(CONFIG)
    assert tokenizer.get_vocab_size() == CONFIG.vocab_size == len(words()) + 3
    (row,) = token_ids(["Anna sings ."], CONFIG).tolist()
    end = tokenizer.token_to_id(CONFIG.end_of_text)
    assert row[3:] == [end] * (CONFIG.n_positions - 3)
    assert tokenizer.decode(row[:3]) == "Anna sings ."
    longest = max(training_sentences(2000, 0, CONFIG), key=lambda text: len(text.split()))
    assert token_ids([longest], CONFIG)[0, -1] == end


def test_words_in_the_same_places_are_alike() -> None:
    ids = token_ids(training_sentences(20_000, 0, CONFIG), CONFIG)
    table = frozen_language_model(ids, CONFIG, 0)
    assert torch.allclose(table.square().mean(1), torch.ones(CONFIG.vocab_size), atol=1e-5)
    unit = torch.nn.functional.normalize(table, dim=1)
    index = {word: unit[i] for i, word in enumerate(words())}
    assert index["girl"] @ index["dog"] > 0.6
    assert index["sees"] @ index["likes"] > 0.6
    assert abs(index["girl"] @ index["likes"]) < 0.4


def test_times_are_drawn_where_the_loss_rises() -> None:
    times = AdaptiveTimes(replace(Recipe(), adaptive=1.0), TangentSchedule())
    random = np.random.default_rng(0)
    times.loss[:] = 0.0
    times.loss[20:] = 1.0
    t, bins = times.draw(4000, random)
    assert np.all((t > 0) & (t < 1))
    assert np.mean((bins >= 17) & (bins <= 22)) > 0.95
    ratio = times.schedule.sigma(t) / times.schedule.alpha(t)
    inside = np.searchsorted(times.edges, np.log(ratio), side="right") - 1
    assert np.mean(inside == bins) > 0.999
    even, _ = AdaptiveTimes(replace(Recipe(), adaptive=0.0), TangentSchedule()).draw(4000, random)
    logs = np.log(times.schedule.sigma(even) / times.schedule.alpha(even))
    low, middle, high = np.quantile(logs, [0.01, 0.5, 0.99])
    assert abs(middle - (low + high) / 2) < 0.15
