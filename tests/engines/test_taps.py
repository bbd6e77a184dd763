"""`ldlm verify --taps`: what the output hides, the intermediates show."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from files_of import graph_path
from rich.console import Console

from engines.artifacts import folder as folders
from engines.artifacts.manifest import FileEntry
from engines.proof import taps
from engines.proof.compare import compare
from engines.proof.inputs import stage_inputs
from engines.proof.questions import ProofOptions
from engines.proof.records import Proof
from engines.proof.saved import save
from engines.proof.stress import stressed
from engines.proof.subject import Subject
from engines.proof.verify import verify
from engines.show.proof import taps_table
from export.equations import TAPS
from export.precision import POLICIES
from export.stages import stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError, ParityError


def looked_at(small: LDLM, folder: Path, precision: str) -> Proof:
    """One stage is enough here; tests/export/test_taps.py has all of them in PyTorch."""
    spec = stage("latent_decoder")
    paths = {spec.name: graph_path(folder, precision, spec.name)}
    return Proof.of(taps.look(Subject(small, spec, POLICIES[precision], paths)))


@pytest.fixture(scope="module")
def found(small: LDLM, small_artifacts: Path) -> Proof:
    return looked_at(small, small_artifacts, "bf16")


def test_no_equation_differs(found: Proof, small: LDLM) -> None:
    """Two questions per stage in half; the formula agrees as closely as float32 does."""
    formula, rounding = found.taps
    assert (formula.about, rounding.about) == ("formula", "rounding")
    assert formula.first is None
    (line,) = found.measurements  # rounding has no gate
    assert line.passed
    assert line.distance == max(formula.errors.values())
    assert 1e-3 < max(rounding.errors.values()) < 0.1  # it rounds
    for report in found.taps:
        assert len(report.errors) == 2 + 27 * small.config.decoder_blocks


def test_the_table_has_a_row_per_equation(found: Proof) -> None:
    for report in found.taps:
        table = TAPS[report.stage.removesuffix("_logits")]
        rows = len(table.before) + len(table.block) + len(table.after)
        shown = taps_table(report)
        assert shown.row_count == rows
        console = Console(width=140, file=io.StringIO())
        console.print(shown)
        assert "[v_b ; v_a]" in console.file.getvalue()  # no markup


def swap_halves(model: ir.Model) -> None:
    """Keys and values in the other order, both: a softmax over all of them does not care."""
    streams = []
    for node in (node for node in model.graph if node.op_type == "Concat"):
        producers = [value.producer() for value in node.inputs]
        if all(producer is not None and producer.op_type == "Split" for producer in producers):
            streams.append(node)
    for node in streams[:2]:
        first, second = node.inputs
        node.replace_input_with(0, second)
        node.replace_input_with(1, first)


def test_swapped_keys_and_values_are_seen_by_taps_alone(small: LDLM, own_artifacts: Path) -> None:
    path = graph_path(own_artifacts, "fp32", "latent_decoder")
    model = ir.load(path)
    swap_halves(model)
    ir.save(model, path)
    manifest = folders.load(own_artifacts)
    old = manifest.graph("fp32", "latent_decoder")
    entry = FileEntry.of(own_artifacts, path)
    manifest.put_graph(dataclasses.replace(old, graph=entry))
    manifest.save(own_artifacts)
    options = ProofOptions(taps=True)
    found = verify(
        own_artifacts, manifest, small, ["fp32"], options=options, stages=["latent_decoder"]
    )
    assert {(line.stage, line.question) for line in found.failures()} == {
        ("latent_decoder", "taps")
    }
    (report,) = found.taps
    assert report.first == "0.k"
    differs = {name for name, error in report.errors.items() if error > 1e-5}
    assert differs == {f"0.{name}" for name in ("k", "K", "v", "S", "F", "A")}
    with pytest.raises(ParityError, match=r"0\.k at batch 2"):
        found.require_passed()
    assert save(own_artifacts, manifest, found).passed is False


def test_a_file_with_other_operators_fails_and_says_where(
    small: LDLM, small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise GraphCheckError("other operators", tensor="after 0.S", expected="Div", got="Softmax")

    monkeypatch.setattr(taps, "tapped_graph", refuse)
    found = looked_at(small, small_artifacts, "fp32")
    ((line,), (report,)) = found.measurements, found.taps
    assert not line.passed
    assert "after 0.S: Softmax" in line.where
    assert found.passed is False
    assert taps_table(report).row_count == 29


def test_equal_choices_do_not_hide_a_lost_softcap(
    small: LDLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 6: tanh is monotone. The largest score stays the largest; the taps differ at F."""
    spec, tough = stage("latent_decoder"), stressed(small)
    inputs = stage_inputs(spec, small.config, 1, 9)
    right = taps.torch_taps(spec.torch(tough), spec, inputs)
    monkeypatch.setattr("ldlm.layers.softcap", lambda scores, cap, d_head: scores / d_head**0.5)
    lost = taps.torch_taps(spec.torch(tough), spec, inputs)
    assert np.array_equal(right["0.S"], lost["0.S"])
    assert np.array_equal(right["0.F"].argmax(-1), lost["0.F"].argmax(-1))
    assert compare(lost["0.F"], right["0.F"]).relative_l2 > 0.1


def test_what_stands_out() -> None:
    floor = 1e-6
    assert taps.first_to_stand_out({"a": 1e-7, "b": 8e-6, "c": 7e-5}, floor) is None
    assert taps.first_to_stand_out({"a": 0.0, "b": 1e-3, "c": 1.0}, floor) == "b"
    assert taps.first_to_stand_out({"a": 1e-2, "b": 1e-2}, floor) == "a"
    assert taps.first_to_stand_out({"a": math.inf}, floor) == "a"
    assert taps.first_to_stand_out({"a": 0.0, "b": math.nan}, floor) == "b"
