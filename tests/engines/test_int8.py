"""int8 from export to text: its gates, its faults, and what it refuses."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from files_of import copy_graphs, graph_path

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.compile.target import Target
from engines.proof.drift import drift
from engines.proof.gates import SIGNAL_LOST, precision_limit
from engines.proof.questions import ProofOptions
from engines.proof.records import Measurement, Proof
from engines.proof.stage import prove
from engines.proof.stress import stressed
from engines.proof.subject import Subject
from engines.proof.update import update
from engines.proof.verify import stress, verify
from engines.quality.evaluate import runs_of
from engines.runtime.load import load_stages
from engines.tensorrt.profiles import profiles
from engines.tensorrt.targets import parse_sms
from export.precision import POLICIES
from export.stages import SAMPLED, compared, stages_of
from ldlm import LDLM
from ldlm.errors import ConfigError
from ldlm.noise import NoiseStream
from ldlm.sampler import SampleRequest, sample
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

INT8 = POLICIES["int8"]


@pytest.fixture(scope="module")
def parity(int8_artifacts: Path, small: LDLM) -> Proof:
    return verify(int8_artifacts, folders.load(int8_artifacts), small, ["int8"])


def lines(parity: Proof, stage: str) -> dict[str, Measurement]:
    return {line.question: line for line in parity.measurements if line.stage == stage}


def test_every_gate_holds(parity: Proof) -> None:
    parity.require_passed()
    found = {line.stage: set(lines(parity, line.stage)) for line in parity.measurements}
    common = {"formula", "graph", "precision"}
    assert found == {
        "denoiser": common | {"loop", "update"},
        "latent_decoder": common,
        "token_decoder_logits": common | {"kl", "tokens"},
    }
    assert {island.source for island in parity.islands} == {"onnx"}  # TensorRT has no int8
    assert {island.expected for island in parity.islands} == {"float32"}


def test_the_error_is_that_of_eight_bits(parity: Proof) -> None:
    """A gate that held for float32 outputs would say nothing about integers."""
    for stage in ("denoiser", "latent_decoder", "token_decoder_logits"):
        assert 1e-3 < lines(parity, stage)["precision"].distance < 0.2


def fewer_levels(graph: ir.Graph) -> None:
    """Weights of four bits in the place of seven."""
    for value in graph.initializers.values():
        if value.dtype == ir.DataType.INT8 and value.const_value is not None:
            codes = value.const_value.numpy()
            coarse = (np.rint(codes / 8) * 8).astype(np.int8)
            value.const_value = ir.tensor(coarse, name=value.name)


def lost_scale(graph: ir.Graph) -> None:
    """One product without the scale of its activations."""
    node = next(n for n in graph if n.op_type == "DynamicQuantizeLinear")
    one = ir.Value(name="one", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    one.const_value = ir.tensor(np.ones((), np.float32), name="one")
    graph.register_initializer(one)
    node.outputs[1].replace_all_uses_with(one)


def turned_channels(graph: ir.Graph) -> None:
    """The scales of one layer's channels in another order."""
    name = next(name for name in graph.initializers if name.endswith("up.scales"))
    value = graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy()[::-1].copy(), name=name)


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (fewer_levels, {"formula", "precision"}),
        (lost_scale, {"graph", "precision"}),
        (turned_channels, {"formula", "precision"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_noticed(
    int8_artifacts: Path,
    small: LDLM,
    tmp_path: Path,
    fault,
    noticed: set[str],  # type: ignore[no-untyped-def]
) -> None:
    folder = copy_graphs(int8_artifacts, "int8", tmp_path / "onnx")
    model = ir.load(folder / "denoiser.onnx")
    fault(model.graph)
    ir.save(model, folder / "denoiser.onnx", external_data="damaged.data")
    paths = {spec.name: folder / f"{spec.name}.onnx" for spec in stages_of("denoiser")}
    subject = Subject(small, compared("denoiser"), INT8, paths)
    found = list(prove(subject.at((2, 17))))
    assert noticed <= {line.question for line in found if not line.passed}


@pytest.mark.long
def test_the_stressed_latent_decoder_is_within_its_gates(small: LDLM, tmp_path: Path) -> None:
    """Outlier channels stretch the one scale that all activations share."""
    subject = Subject(small, compared("latent_decoder"), INT8)
    found = Proof.of(stress(subject, stressed(small), tmp_path))
    assert {(m.batch, m.length) for m in found.measurements if m.batch} == {(1, 17), (3, 128)}
    assert {m.checkpoint for m in found.measurements} == {"stress"}
    found.require_passed()


def test_an_error_as_large_as_the_signal_is_no_precision() -> None:
    """PyTorch's own integers lose all on outliers: to be no worse than that is not enough."""
    assert precision_limit(0.1) == pytest.approx(0.125)
    assert precision_limit(0.9) == SIGNAL_LOST
    assert precision_limit(float("inf")) == float("inf")


def test_the_sampler_drifts_no_more_than_pytorchs(int8_artifacts: Path, small: LDLM) -> None:
    paths = {name: graph_path(int8_artifacts, "int8", name) for name in SAMPLED}
    subject = Subject(small, compared("denoiser"), INT8, paths)
    found = Proof.of(drift(subject, steps=40, length=8))
    assert {line.question for line in found.measurements} == {"drift", "drift tokens"}
    assert not found.failures()
    assert min(found.drift[0].errors) > 1e-4


def request(**fields: object) -> SampleRequest:
    wanted = {"length": 16, "samples": 5, "batch_size": 3, "steps": 40, "solver": "ddpm", **fields}
    return SampleRequest(**wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("plain", [False, True])
def test_a_batch_changes_no_text(int8_artifacts: Path, plain: bool) -> None:
    stages = load_stages(
        int8_artifacts, folders.load(int8_artifacts), precision="int8", plain=plain
    )
    together, apart = (sample(stages, request(batch_size=size)) for size in (3, 1))
    assert np.array_equal(together, apart)


def test_together_they_would_change_one_another(int8_artifacts: Path) -> None:
    """Why every sample goes through by itself: the scale is one for all of a call."""
    stages = load_stages(int8_artifacts, folders.load(int8_artifacts), precision="int8")
    assert stages.one_at_a_time
    schedule = TangentSchedule()
    run = stages.loop(step_table("ddim", schedule, schedule.grid(20)))

    def latents(samples: int) -> np.ndarray:
        with closing(run(NoiseStream(0, range(samples), (16, 128)))) as steps:
            return [step.x() for step in itertools.islice(steps, 20)][-1]

    pair, single = latents(2), latents(1)
    assert not np.allclose(pair[:1], single, rtol=1e-4)


def test_what_it_is_not_for(int8_artifacts: Path, small: LDLM) -> None:
    manifest = folders.load(int8_artifacts)
    target = Target(parse_sms("80"))
    with pytest.raises(ConfigError, match="rtx does not run this precision"):
        Build(int8_artifacts, target, profiles(small.config)).run(["int8"], lambda *_: None)
    for options, reason in (
        (ProofOptions(taps=True), "taps"),
        (ProofOptions(self_test=True), "self-test"),
        (ProofOptions(ablate=True), "no half"),
        (ProofOptions(runtime="rtx"), "rtx does not run this precision"),
    ):
        with pytest.raises(ConfigError, match=reason):
            verify(int8_artifacts, manifest, small, ["int8"], options=options)
    runs = runs_of(["int8"], ["ort", "evaluator", "rtx"])
    assert runs == [("torch", "fp32"), ("ort", "int8")]


@pytest.mark.parametrize("where", [
    {"runtime": "evaluator"}, {"runtime": "rtx"}, {"provider": "cuda"},
])  # fmt: skip # rows, as a table
def test_other_runtimes_are_refused(int8_artifacts: Path, where: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="int8"):
        load_stages(int8_artifacts, folders.load(int8_artifacts), precision="int8", **where)


def test_without_a_list_int8_is_left_out_of_what_it_is_not_for(
    int8_artifacts: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make parity` must go on where int8 was exported."""
    asked: list[list[str]] = []

    def verified(folder: Path, manifest: Any, model: Any, names: list[str], *rest: Any) -> Proof:
        asked.append(names)
        return Proof()

    monkeypatch.setattr("engines.proof.verify.verify", verified)
    told: list[str] = []
    for options in (
        ProofOptions(self_test=True),
        ProofOptions(taps=True),
        ProofOptions(runtime="rtx"),
        ProofOptions(),
    ):
        found = update(
            int8_artifacts, small_checkpoint, options=options, again=True, say=told.append
        )
        assert found.new.passed
    floats = ["fp32", "fp16", "bf16"]
    assert asked == [floats, floats, floats, [*floats, "int8"]]
    assert [text for text in told if "left out: int8" in text] == 3 * [told[0]]


def test_other_precisions_are_built_beside_it(int8_artifacts: Path, small: LDLM) -> None:
    """`ldlm build` without a list takes what TensorRT takes."""
    target = Target(parse_sms("all"), skip_unsupported=True)
    ranges = profiles(small.config)
    decisions = Build(int8_artifacts, target, ranges).run(None, lambda *_: None)
    assert {d.what.partition(" ")[0] for d in decisions} == {"fp32", "fp16", "bf16"}
    assert not any(d.reasons for d in decisions)
