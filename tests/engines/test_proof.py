"""The proof as a whole: stress weights, islands switched off, damaged graphs, the sampler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from files_of import graph_path

from engines import OrtStage, compare
from engines.evaluator.half import HalfProducts
from engines.proof import islands
from engines.proof.drift import drift
from engines.proof.gates import AUTOCAST_RATIO
from engines.proof.inputs import stage_inputs
from engines.proof.questions import SAMPLER, Question
from engines.proof.records import UNDAMAGED, Ablation, Measurement, Outcome, Proof
from engines.proof.sabotage.damages import DAMAGES
from engines.proof.sabotage.selftest import self_test
from engines.proof.stress import CHANNELS, stress_inputs, stressed
from engines.proof.subject import Subject
from engines.proof.verify import stress
from engines.runtime.torch import EvaluatorStage, TorchStage
from engines.show.proof import ablation_table, answers_table, self_test_table
from export import export_stage, precision
from export.precision import POLICIES, Precision
from export.stages import SAMPLED, compared, components, stage, stages_of
from ldlm import LDLM
from ldlm.errors import ConfigError, ParityError

PRECISIONS = ["fp32", "fp16", "bf16"]


@pytest.fixture(scope="module")
def tough(small: LDLM) -> LDLM:
    return stressed(small)


@pytest.fixture(scope="module")
def private_artifacts(small_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: the proof's temporary files must not show in what other workers list."""
    folder = tmp_path_factory.mktemp("private") / "artifacts"
    return Path(shutil.copytree(small_artifacts, folder))


def subject(model: LDLM, folder: Path, precision: str, names: Sequence[str]) -> Subject:
    """The component of the first of these stages, with the graphs of all of them."""
    paths = {name: graph_path(folder, precision, name) for name in names}
    return Subject(model, compared(stage(names[0]).component), POLICIES[precision], paths)


def test_stress_weights_have_what_trained_ones_have(small: LDLM, tough: LDLM) -> None:
    """Outliers of 1e3 whose squares pass 65504, scores at the cap, gains away from 1."""
    seen: dict[str, torch.Tensor] = {}
    tough.denoiser.final_norm.register_forward_pre_hook(lambda _, x: seen.update(stream=x[0]))
    softmax = tough.latent_decoder.blocks[0].attention.attend.softmax
    softmax.register_forward_pre_hook(lambda _, x: seen.update(scores=x[0]))
    for name in ("denoiser", "latent_decoder"):
        TorchStage(tough, stage(name))(*stage_inputs(stage(name), tough.config, 2, 17))
    outliers = seen["stream"][..., list(CHANNELS)].abs()
    assert outliers.min() > 500
    assert (outliers.double() ** 2).min() > 65504
    assert seen["scores"].abs().max() / tough.config.d_head**0.5 > tough.config.softcap
    assert (tough.denoiser.blocks[0].norm1.weight - 1).abs().median() > 1
    (h_hat,) = stress_inputs(stage("token_decoder"), (np.zeros((1, 2, 128), np.float32),))
    assert np.abs(h_hat).max() == 1000
    assert torch.equal(small.denoiser.input.bias, stressed(small).denoiser.input.bias) is False


@pytest.mark.long(ci=True)
@pytest.mark.fault(3)
@pytest.mark.parametrize(
    ("name", "island"),
    [
        ("denoiser", "layer_norm"),
        ("latent_decoder", "layer_norm"),
        ("latent_decoder", "rms_norm"),
    ],
)
def test_a_half_norm_that_overflows_is_noticed_without_a_gpu(
    tough: LDLM, tmp_path: Path, name: str, island: str
) -> None:
    """Case 3: an fp16 norm that overflows is noticed on a machine without a GPU."""
    spec = stage(name)
    arrays = stress_inputs(spec, stage_inputs(spec, tough.config, 3, 64))
    expected = TorchStage(tough, spec)(*arrays)
    with HalfProducts(torch.float16):
        autocast = compare(TorchStage(tough, spec)(*arrays), expected)
    limit = AUTOCAST_RATIO * autocast.relative_l2
    experiment = POLICIES["fp16"].without([island])
    graphs = export_stage(tough, spec.component, experiment, tmp_path)
    (graph,) = (graph for graph in graphs if graph.spec == spec)
    found = compare(EvaluatorStage(graph.path, spec, tough.config)(*arrays), expected)
    assert found.non_finite or found.relative_l2 > 100 * limit
    hidden = compare(OrtStage(graph.path, spec, tough.config)(*arrays), expected)
    assert hidden.relative_l2 < 4 * limit  # the CPU provider hides it


@pytest.mark.long
def test_ablation_shows_what_an_island_buys(small: LDLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh weights make a lost island look harmless; stress weights do not."""
    monkeypatch.setattr(precision, "ISLANDS", ("layer_norm",))  # one is enough here
    rows = list(islands.ablate(Subject(small, compared("token_decoder"), POLICIES["fp16"])))
    variants = [(), ("layer_norm",)]
    assert [(r.checkpoint, r.off) for r in rows] == [
        (checkpoint, off) for checkpoint in ("given", "stress") for off in variants
    ]
    ratio = {(row.checkpoint, row.off): row.ratio for row in rows}
    assert all(row.passed == (not row.off) for row in rows)
    assert ratio["given", ("layer_norm",)] < 2
    assert ratio["stress", ("layer_norm",)] > 100
    record = Proof(ablation=tuple(rows))
    assert ablation_table(record).row_count == 2
    assert record.passed is True  # an experiment, not a gate


def test_an_overflow_is_no_ratio() -> None:
    row = Ablation("denoiser", "fp16", "stress", ("layer_norm",), float("inf"), 1e-3)
    assert not row.passed
    assert row.error is None
    table = ablation_table(Proof(ablation=(row,)))
    assert "inf" in [str(cell) for column in table.columns for cell in column.cells]


def test_islands_have_names() -> None:
    with pytest.raises(ConfigError, match="layer_norm"):
        POLICIES["fp16"].without(["layernorm"])
    with pytest.raises(ConfigError, match="no island to switch off"):
        Precision.of("fp32-without-layer_norm")
    with pytest.raises(ConfigError, match="no such precision"):
        Precision.of("fp12-without-layer_norm")
    experiment = POLICIES["fp16"].without(["residual", "layer_norm"])
    assert str(experiment) == "fp16-without-layer_norm+residual"
    assert Precision.of(str(experiment)) == experiment
    half = {rule.what for rule in experiment.rules if rule.dtype == "float16"}
    assert {"layer_norm", "residual", "linear"} <= half
    assert not half & {"rms_norm", "softcap_softmax", "time_embedding"}
    off = POLICIES["bf16"].without(precision.ISLANDS)
    assert {rule.dtype for rule in off.rules} == {"bfloat16"}


@pytest.mark.long(ci=True)
def test_every_stage_is_within_its_gate_on_stress_weights(
    small: LDLM, tough: LDLM, private_artifacts: Path
) -> None:
    found = [
        measurement
        for component in components()
        for measurement in stress(
            Subject(small, compared(component), POLICIES["fp16"]), tough, private_artifacts
        )
    ]
    Proof(tuple(found)).require_passed()
    assert {measurement.checkpoint for measurement in found} == {"stress"}
    assert {measurement.stage for measurement in found} == {
        "denoiser", "latent_decoder", "token_decoder_logits",
    }  # fmt: skip # rows, as a table
    asked = {measurement.question for measurement in found}
    assert {"formula", "graph", "precision", "kl", "tokens"} <= asked


@pytest.fixture(scope="module")
def outcomes(small: LDLM, private_artifacts: Path) -> list[Outcome]:
    return [
        outcome
        for name in PRECISIONS
        for component in components()
        for outcome in self_test(
            subject(small, private_artifacts, name, [s.name for s in stages_of(component)])
        )
    ]


def record_of(outcomes: list[Outcome]) -> Proof:
    return Proof(self_test=tuple(outcomes))


def test_every_damage_is_noticed_in_every_precision(outcomes: list[Outcome]) -> None:
    """100 %: a damaged graph that passes is a failure of the proof."""
    damaged = [outcome for outcome in outcomes if outcome.damage != UNDAMAGED]
    assert len(damaged) == len(DAMAGES) * len(PRECISIONS)
    assert all(outcome.noticed_by for outcome in damaged)
    intact = [outcome for outcome in outcomes if outcome.damage == UNDAMAGED]
    assert len(intact) == 4 * len(PRECISIONS)  # and nobody cries wolf
    assert not any(outcome.noticed_by for outcome in intact)
    record_of(outcomes).require_passed()
    by = {question for outcome in outcomes for question in outcome.noticed_by}
    assert by == {"checks", "islands", "graph", "formula"}  # none of the questions is idle


def test_a_damage_that_passes_is_a_failure(outcomes: list[Outcome]) -> None:
    missed = Outcome("denoiser", "fp16", "nothing done", ())
    record = record_of([*outcomes, missed])
    with pytest.raises(ParityError, match="nothing done"):
        record.require_passed()
    cried = record_of([Outcome("denoiser", "fp16", UNDAMAGED, ("islands",))])
    with pytest.raises(ParityError, match="undamaged"):
        cried.require_passed()
    assert record.passed is False


def test_the_table_shouts_only_at_what_is_wrong() -> None:
    fine = Outcome("denoiser", "fp16", UNDAMAGED, ())
    missed = Outcome("latent_decoder", "fp16", "softcap removed", ())
    cells = {}
    for outcome in (fine, missed):
        (cell,) = self_test_table(record_of([outcome])).columns[2].cells
        cells[outcome.damage] = (str(cell), cell.style)
    assert cells == {UNDAMAGED: ("nobody", ""), "softcap removed": ("NOBODY", "red")}


def test_a_failing_sampler_is_in_the_answers() -> None:
    found = Measurement(SAMPLER, "fp16", "given", Question.DRIFT, 1, 8, 0.5, 0.1)
    table = answers_table(Proof((found,)))
    assert "NO: 1 of 1, 5 times the limit" in str(list(table.columns[3].cells)[-1])


def test_the_self_test_leaves_no_file(private_artifacts: Path, outcomes: list[Outcome]) -> None:
    assert outcomes
    assert not list(private_artifacts.rglob(".partial*"))


@pytest.mark.fault(2)
def test_an_island_turned_to_half_by_a_converter_is_noticed(
    small_artifacts: Path, tmp_path: Path
) -> None:
    """Case 2: the island's inner cast to float16, as a well-known converter does."""
    spec, fp16 = stage("denoiser"), POLICIES["fp16"]
    good = graph_path(small_artifacts, "fp16", "denoiser")
    assert all(record.passed for record in islands.look(good, spec, fp16))
    model = ir.load(good)
    next(d for d in DAMAGES if d.name == "LayerNorm in half" and d.stage == "denoiser").apply(model)
    ir.save(model, tmp_path / "denoiser.onnx", external_data="denoiser.onnx.data")
    records = islands.look(tmp_path / "denoiser.onnx", spec, fp16)
    failed = {record.source for record in records if not record.passed}
    assert failed == {"onnx", "tensorrt"}  # TensorRT's own network says so too


@pytest.mark.fault(6)
def test_equal_greedy_tokens_do_not_hide_other_logits(
    small: LDLM, small_artifacts: Path, tmp_path: Path
) -> None:
    """Case 6: token agreement alone passes what the logits show."""
    spec = stage("token_decoder_logits")
    model = ir.load(graph_path(small_artifacts, "fp32", "token_decoder_logits"))
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.shape == (128, 259):
            array = value.const_value.numpy() * np.float32(1.5)
            value.const_value = ir.tensor(array, name=value.name)
    ir.save(model, tmp_path / "x.onnx", external_data="x.onnx.data")
    arrays = stage_inputs(spec, small.config, 2, 17)
    got, expected = (
        OrtStage(tmp_path / "x.onnx", spec, small.config)(*arrays),
        TorchStage(small, spec)(*arrays),
    )
    assert np.array_equal(got.argmax(-1), expected.argmax(-1))
    assert compare(got, expected).relative_l2 > 0.1


@pytest.mark.long
def test_the_sampler_does_not_drift_over_1024_steps(small: LDLM, small_artifacts: Path) -> None:
    found = Proof.of(
        record
        for name in ("fp32", "fp16")
        for record in drift(subject(small, small_artifacts, name, SAMPLED), steps=1024, length=8)
    )
    assert {line.question for line in found.measurements} == {"drift", "drift tokens"}
    assert not found.failures()
    errors = {curve.precision: curve.errors for curve in found.drift}
    assert {name: len(curve) for name, curve in errors.items()} == {"fp32": 1024, "fp16": 1024}
    assert 1e-5 < np.mean(errors["fp16"]) < 1e-2  # it rounds, and does not run away
    assert max(errors["fp32"]) < 1e-5


@pytest.mark.long
@pytest.mark.fault(5)
def test_python_without_asserts_exports_no_lost_softcap(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    """Case 5: under `python -O` a softcap that is lost still stops the export."""
    program = (
        "import sys, torch, ldlm.layers\n"
        "ldlm.layers.softcap = lambda scores, cap, d_head: scores / d_head**0.5\n"
        "from pathlib import Path\n"
        "from export import export_stage\n"
        "from ldlm import LDLM\n"
        "assert False, 'asserts are on'\n"
        "model = LDLM.from_checkpoint(sys.argv[1])\n"
        "export_stage(model, 'latent_decoder', 'fp32', Path(sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program, str(small_checkpoint), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "a missing Tanh means that the softcap was lost in the export" in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_behaviour_in_asserts() -> None:
    """Case 5: `python -O` removes asserts; the packages have none."""
    import ast

    root = Path(__file__).parents[2]
    for package in ("ldlm", "export", "engines"):
        for path in (root / package).rglob("*.py"):
            tree = ast.parse(path.read_text("utf-8"))
            assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
