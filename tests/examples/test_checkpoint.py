"""The trained checkpoint in the repository: what it is said to be, in every precision."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from engines.artifacts import folder as folders
from engines.artifacts.export import Export
from engines.proof.questions import ProofOptions
from engines.proof.verify import verify
from engines.quality.evaluate import evaluate, load_judge
from engines.quality.records import Quality
from ldlm import LDLM, files
from ldlm.sampler import SampleRequest

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "examples" / "grammar" / "checkpoint"
PRECISIONS = ["fp16"]  # where trained activations matter; the card has all of them


@pytest.fixture(scope="session")
def grammar_artifacts(shared: Path) -> Path:
    """Graphs of the trained checkpoint; made once per run, whichever worker comes first."""
    folder = shared / "artifacts" / "grammar"
    with files.locked(shared):
        if not folder.exists():
            Export(CHECKPOINT, folder, PRECISIONS).run(lambda _: None)
    return folder


@pytest.fixture(scope="module")
def rows(grammar_artifacts: Path) -> dict[tuple[str, str], Quality]:
    manifest = folders.load(grammar_artifacts)
    config = manifest.config
    request = SampleRequest(
        length=config.n_positions, samples=32, batch_size=32, steps=32, solver="ddpm", seed=5
    )
    judge = load_judge(ROOT / "examples" / "grammar" / "judge.py")
    found = evaluate(
        grammar_artifacts, manifest, CHECKPOINT, PRECISIONS, request, judge, lambda *_: None
    )
    return {(row.runtime, row.precision): row for row in found.rows}


def test_the_card_names_the_file_that_is_there() -> None:
    card = (ROOT / "examples" / "grammar" / "README.md").read_text("utf-8")
    weights = CHECKPOINT / "model.safetensors"
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in card
    assert weights.stat().st_size <= 16_000_000
    log = [json.loads(line) for line in (CHECKPOINT.parent / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == sorted(line["step"] for line in log)
    steps = re.search(r"([\d,]+) steps of 64 sentences", card)
    assert steps is not None
    assert log[-1]["step"] == int(steps.group(1).replace(",", ""))
    assert log[-1]["diffusion"] < log[5]["diffusion"]


def test_trained_weights_pass_every_gate(grammar_artifacts: Path) -> None:
    """Trained activations, the sampler's drift among them."""
    manifest = folders.load(grammar_artifacts)
    model = LDLM.from_checkpoint(CHECKPOINT)
    options = ProofOptions(sampler_steps=32)
    proof = verify(grammar_artifacts, manifest, model, PRECISIONS, options=options)
    proof.require_passed()


def test_most_texts_are_sentences(rows: dict[tuple[str, str], Quality]) -> None:
    """32 texts: what a model of the card's quality falls below once in thousands of runs."""
    row = rows["torch", "fp32"]
    assert row.accepted.value > 0.7
    assert row.unseen.value > 0.5
    assert row.distinct >= 29
    assert 5 < row.mean_words < 9


def test_every_precision_writes_nearly_the_same_text(
    rows: dict[tuple[str, str], Quality],
) -> None:
    agreement = {key: row.agreement for key, row in rows.items()}
    assert min(agreement.values()) > 0.9
    accepted = np.array([row.accepted.value for row in rows.values()])
    assert np.ptp(accepted) < 0.1
