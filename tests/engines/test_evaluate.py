"""`ldlm evaluate`: the judge's verdict, counted right, on the same noise everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engines.cli import main
from engines.proof.saved import Saved, read_json
from engines.quality.evaluate import JUDGED, before_end, load_judge, runs_of
from engines.quality.records import QualityReport, Share
from engines.show.findings import quality_table
from ldlm.errors import ConfigError

JUDGE = """
from beside import letters
accepts = lambda text: letters(text) % 2 == 0
def seen():
    return ["a text that no model writes"]
"""


def read(folder: Path) -> Saved[QualityReport]:
    return read_json(folder / "quality.json", QualityReport, "not evaluated yet")


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("letters = len\n")
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path / "judge.py"


def test_every_precision_is_judged_on_the_same_noise(
    own_artifacts: Path,
    small_checkpoint: Path,
    judge: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--checkpoint", str(small_checkpoint), "--judge", str(judge), "-n", "3",
                 "--steps", "3", "--json"]  # fmt: skip # rows, as a table
    monkeypatch.setattr("sys.argv", ["ldlm", "evaluate", str(own_artifacts), *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    assert not caught.value.code, shown.err
    document = json.loads(shown.out)
    assert document == json.loads((own_artifacts / "quality.json").read_text())
    rows = {(row["runtime"], row["precision"]): row for row in document["rows"]}
    assert list(rows) == [
        ("torch", "fp32"), ("ort", "fp32"), ("ort", "fp16"), ("evaluator", "fp16"),
        ("evaluator", "bf16"),
    ]  # fmt: skip # rows, as a table
    assert rows["torch", "fp32"]["agreement"] == 1.0
    assert rows["ort", "fp32"]["agreement"] == 1.0
    assert rows["evaluator", "bf16"]["agreement"] < 1.0  # random weights: near-ties decide
    for row in rows.values():
        assert row["samples"] == 3
        assert row["unseen"]["value"] in (0.0, 1.0)  # of none, or of all that is accepted
        assert 0 <= row["accepted"]["low"] <= row["accepted"]["value"] <= row["accepted"]["high"]
    report = read(own_artifacts).content
    assert report is not None
    assert quality_table(report).row_count == 5
    rows["torch", "fp32"]["agreement"] = "high"
    (own_artifacts / "quality.json").write_text(json.dumps(document))
    assert "not evaluated yet: quality.json" in read(own_artifacts).problem
    assert "rows[0].agreement" in read(own_artifacts).problem


def test_wilsons_interval() -> None:
    """Against the values of the published formula."""
    share = Share.of(90, 100)
    assert share.value == 0.9
    assert share.low == pytest.approx(0.8256, abs=1e-4)
    assert share.high == pytest.approx(0.9448, abs=1e-4)
    assert Share.of(0, 10).low == 0.0
    assert Share.of(10, 10).high == 1.0


def test_an_experiment_runs_in_the_evaluator_too() -> None:
    assert runs_of(["bf16", "fp16-without-layer_norm"], JUDGED) == [
        ("torch", "fp32"), ("evaluator", "bf16"),
        ("ort", "fp16-without-layer_norm"), ("evaluator", "fp16-without-layer_norm"),
    ]  # fmt: skip # rows, as a table


def test_a_file_that_is_no_judge(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no judge there"):
        load_judge(tmp_path / "nothing.py")
    (tmp_path / "half.py").write_text("def accepts(text): return True\n")
    with pytest.raises(ConfigError, match="seen"):
        load_judge(tmp_path / "half.py")
    for text in ("def", "import nothing_of_this_name", "accepts = 3\nseen = list"):
        (tmp_path / "broken.py").write_text(text)
        with pytest.raises(ConfigError, match="not a usable judge") as caught:
            load_judge(tmp_path / "broken.py")
        assert "remedy" in caught.value.details


def test_what_counts_is_the_text_and_its_end() -> None:
    end = 9
    ids = np.array([[1, 2, 9, 9], [1, 9, 5, 9], [1, 2, 3, 4]])
    reference = np.array([[1, 9, 9, 9], [1, 9, 9, 9], [1, 2, 3, 4]])
    inside = before_end(ids, reference, end)
    assert inside.tolist() == [[True, True, True, False], [True, True, False, False], [True] * 4]
